#!/usr/bin/env bash
# Trains. On first use it makes the environment.
#
#   ./run_train.sh                                                        the default: a small LLaMA, 4 pipeline ranks
#   CONFIG_FILE=train_configs/x.toml NGPU=4 ./run_train.sh --section.key=value
#
# NGPU                 processes on this host (default 4): one for each GPU, or that many on the CPU where there are
#                      fewer GPUs
# TORCHRUN_ARGS        for several hosts: "--nnodes=2 --node_rank=0 --master_addr=... --master_port=..."
# TIMELYFREEZE_PYTHON  a Python of your own, with your own torch; default: an activated environment that has the
#                      project, or else .venv, which is made here
#
# The same without this script: timelyfreeze train CONFIG.toml --nproc 4 --section.key=value
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=${CONFIG_FILE:-$here/train_configs/tiny_8m.toml}
[ ! -f "$config" ] || config=$(realpath "$config")
cd "$here"
source scripts/environment.sh
choose_python
exec "$python" -m timelyfreeze train "$config" "$@"
