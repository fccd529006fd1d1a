#!/usr/bin/env bash
# Trains. On first use it makes the environment.
#
#   ./run_train.sh                                                        the default: a small LLaMA, 4 pipeline ranks
#   CONFIG_FILE=train_configs/x.toml NGPU=4 ./run_train.sh --section.key=value
#
# NGPU      processes on this host (default 4): one for each GPU, or that many on the CPU where there are fewer GPUs
# LOG_RANK  ranks whose log is shown besides the one that has the loss, comma separated
# Further variables of torchrun (MASTER_ADDR, ...) are for several hosts: TORCHRUN_ARGS="--nnodes=2 --node_rank=0 ..."
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

config=${CONFIG_FILE:-$here/train_configs/tiny_8m.toml}
if [ -f "$config" ]; then
  config=$(realpath "$config")
fi
cd "$here"
if [ ! -f "$config" ]; then
  echo "error: CONFIG_FILE is '$config', which is no file here nor in $here" >&2
  exit 2
fi
ngpu=${NGPU:-4}
if ! [[ $ngpu =~ ^[1-9][0-9]{0,4}$ ]]; then
  echo "error: NGPU is '$ngpu'; it must be a number of processes, 1 or more" >&2
  exit 2
fi
scripts/setup.sh

if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)
else
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
if [ "$gpus" -lt "$ngpu" ]; then
  [ "$gpus" -eq 0 ] || echo "Using the CPU: $ngpu processes were asked for and $gpus GPUs are visible"
  export CUDA_VISIBLE_DEVICES=""
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > ngpu ? cores / ngpu : 1 ))}
fi
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# tqdm and warnings of libraries go to the terminal of every process; only ours are wanted.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

# shellcheck disable=SC2086
exec .venv/bin/torchrun --nproc_per_node="$ngpu" \
  ${TORCHRUN_ARGS:---rdzv_backend=c10d --rdzv_endpoint=localhost:0} \
  -m torchtitan.freezing --job.config_file "$config" "$@"
