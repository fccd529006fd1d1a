#!/usr/bin/env bash
# Scores a model on MMLU, HellaSwag, ARC-Challenge and TruthfulQA with lm-eval. On first use it installs lm-eval.
#
#   scripts/evaluate.sh RUN_OR_FOLDER                      questions from the hub
#   scripts/evaluate.sh RUN_OR_FOLDER --data-dir FOLDER    questions from local files, without a network
#   scripts/evaluate.sh RUN_OR_FOLDER --limit 20           a quick look
#
# RUN_OR_FOLDER is a run (the report of a training names its folder) or a Hugging Face folder. --help lists all options;
# docs/evaluation.md says what the metrics are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/usage.sh"
expect_options "--step --data-dir --limit --benchmarks --output --device --dtype --batch-size" "$@"
expect_first -d RUN_OR_FOLDER "$@"
"$here/setup.sh" eval
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
exec "$here/../.venv/bin/python" "$here/evaluate.py" "$@"
