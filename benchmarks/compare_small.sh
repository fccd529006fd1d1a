#!/usr/bin/env bash
# Compares all freezing methods on a small model: makes the table of docs/results/methods.toml.
#
# Usage: benchmarks/compare_small.sh BASE_EXAMPLES EXAMPLES OUTPUT [options of timelyfreeze compare run]
#
# BASE_EXAMPLES and EXAMPLES are files with one JSON object a line: instruction, input, output. A base model is trained on
# BASE_EXAMPLES, once; then every method fine-tunes it on EXAMPLES. Called again, it goes on where it stopped.
# Nothing else should run on the machine meanwhile.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/usage.sh"
case ${1:-} in -h | --help) usage 0 ;; esac
[ $# -ge 3 ] || refuse "BASE_EXAMPLES, EXAMPLES and OUTPUT are needed"
expect_first -f BASE_EXAMPLES "$1"
expect_first -f EXAMPLES "$2"
[ ! -e "$3" ] || expect_first -d OUTPUT "$3"
base_examples=$(realpath "$1") examples=$(realpath "$2") output=$(realpath -m "$3")
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python

steps=300
base=$output/base/checkpoint/step-$steps
if [ ! -d "$base" ]; then
  echo "Training the base model: $steps steps"
  "$python" -m timelyfreeze train train_configs/tiny_8m.toml --nproc 2 --job.dump_folder="$output/base" \
    --training.dataset_path="$base_examples" --training.steps=$steps --lr_scheduler.warmup_steps=20 \
    --parallelism.pipeline_parallel_degree=2 --freezing.method=none \
    --checkpoint.enable --checkpoint.interval=$steps
fi
exec "$python" -m timelyfreeze compare run train_configs/compare_8m.toml "$output" \
  --methods none timelyfreeze apf autofreeze timelyfreeze+apf timelyfreeze+autofreeze \
  pipetransformer smartpipe fixed linear lisa \
  --schedules GPipe 1F1B --seeds 42 22 11 --nproc 2 "$@" \
  -- --training.dataset_path="$examples" --validation.dataset_path="$examples" --checkpoint.initial_load_path="$base"
