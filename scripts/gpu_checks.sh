#!/usr/bin/env bash
# Everything that waits for GPUs, in one go: tests marked gpu, the default run over NCCL, the paired benchmarks, and every
# freezing method once.
#
#   scripts/gpu_checks.sh [N_GPUS]      default: all visible ones, 2 at least for the pipeline
#
# Prints markdown tables; copy them into docs/results.md with the hardware's name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpus=${1:-$(nvidia-smi -L | grep -c '^GPU')}

.venv/bin/python -m pytest -m gpu tests/gpu
if [ "$gpus" -lt 2 ]; then
  echo "Only $gpus GPU is visible; a pipeline needs 2 or more. The pipeline checks were not run." >&2
  exit 0
fi
NGPU=$gpus ./run_train.sh --parallelism.pipeline_parallel_degree="$gpus" --training.mixed_precision_param=bfloat16
.venv/bin/python scripts/benchmark.py plain --ranks "$gpus" --schedules 1F1B
.venv/bin/python scripts/benchmark.py gain --ranks "$gpus" --first-stage all_or_nothing keep_chain \
  --training.mixed_precision_param=bfloat16
.venv/bin/python scripts/compare_methods.py run train_configs/compare_8m.toml outputs/gpu_comparison --nproc "$gpus" \
  --schedules 1F1B --methods none timelyfreeze apf autofreeze timelyfreeze+apf timelyfreeze+autofreeze pipetransformer \
  smartpipe fixed linear lisa -- --training.mixed_precision_param=bfloat16 --checkpoint.no-enable \
  --training.dataset_path=tests/assets/tiny_instruct --validation.dataset_path=tests/assets/tiny_instruct \
  --parallelism.pipeline_parallel_degree="$gpus"
