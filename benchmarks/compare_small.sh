#!/usr/bin/env bash
# Compares all freezing methods on a small model: makes the table "Methods compared" of docs/results.md.
#
# Usage: benchmarks/compare_small.sh BASE_ROWS ROWS OUTPUT [arguments of timelyfreeze/compare/run_command.py run]
#
# BASE_ROWS and ROWS are files with one JSON object a line: instruction, input, output. A base model is trained on
# BASE_ROWS, once; then every method fine-tunes it on ROWS. Called again, it goes on where it stopped.
# Nothing else should run on the machine meanwhile.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/usage.sh"
case ${1:-} in -h | --help) usage 0 ;; esac
[ $# -ge 3 ] || refuse "BASE_ROWS, ROWS and OUTPUT are needed"
expect_first -f BASE_ROWS "$1"
expect_first -f ROWS "$2"
[ ! -e "$3" ] || expect_first -d OUTPUT "$3"
base_rows=$(realpath "$1") rows=$(realpath "$2") output=$(realpath -m "$3")
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh

steps=300
base=$output/base/checkpoint/step-$steps
if [ ! -d "$base" ]; then
  echo "Training the base model: $steps steps"
  CONFIG_FILE=train_configs/tiny_8m.toml NGPU=2 ./run_train.sh --job.dump_folder="$output/base" \
    --training.dataset_path="$base_rows" --training.steps=$steps --lr_scheduler.warmup_steps=20 \
    --parallelism.pipeline_parallel_degree=2 --freezing.method=none \
    --checkpoint.enable --checkpoint.interval=$steps
fi
exec .venv/bin/python timelyfreeze/compare/run_command.py run train_configs/compare_8m.toml "$output" \
  --methods none timelyfreeze apf autofreeze timelyfreeze+apf timelyfreeze+autofreeze \
  pipetransformer smartpipe fixed linear lisa \
  --schedules GPipe 1F1B --seeds 42 22 11 --nproc 2 "$@" \
  -- --training.dataset_path="$rows" --validation.dataset_path="$rows" --checkpoint.initial_load_path="$base"
