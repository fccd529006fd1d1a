#!/usr/bin/env bash
# Trains on several hosts under Slurm: one launcher on each, which starts a process for each of its GPUs.
#
#   CONFIG_FILE=train_configs/llama3_8b.toml sbatch --nodes=2 --gpus-per-node=4 scripts/slurm.sh --section.key=value
#
# Submit it from the repository, which all hosts must see at the same path, with .venv made beforehand (scripts/setup.sh).
# The pipeline's ranks are numbered host by host, so neighbours share a host wherever they can.
# PORT      of the first host, on which the others find it (default 29500)
#SBATCH --job-name=timelyfreeze
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail

if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
  echo "error: no Slurm job; submit this script with sbatch from the repository" >&2
  exit 2
fi
if [ ! -x ./run_train.sh ]; then
  echo "error: $PWD has no run_train.sh; submit this script from the repository" >&2
  exit 2
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Slurm numbers the hosts; $SLURM_NODEID is that of the host on which it is read, so srun must expand it.
export HEAD_ADDRESS=${hosts[0]} HEAD_PORT=${PORT:-29500} NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-4}}
exec srun --kill-on-bad-exit=1 bash -c '
  export TORCHRUN_ARGS="--nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --master_addr=$HEAD_ADDRESS --master_port=$HEAD_PORT"
  exec ./run_train.sh "$@"
' run_train.sh "$@"
