#!/usr/bin/env bash
# Trains with the recipes for other trainers, TorchTitan 0.3 and NeMo AutoModel 0.7, on two CPU ranks: in one go,
# stopped and resumed. Tells what the plan had said and what was measured.
#
# Usage: scripts/test_hosts.sh [titan|automodel]...
# Each has an environment, .venv-titan and .venv-automodel, made on first use. TorchTitan's has torch for CUDA, 6 GB, since its
# trainer needs torch 2.14. pip's own settings (index, proxies, caches) are respected.
# PYTHON=/path/to/python chooses the interpreter, 3.11 or 3.12. ENVIRONMENTS=FOLDER is where environments are (default: here)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || set -- titan automodel
for host in "$@"; do
  [[ $host =~ ^(titan|automodel)$ ]] || refuse "'$host' is neither titan nor automodel"
done
for host in "$@"; do
  case $host in
    titan) packages=(torch==2.14.1 torchtitan==0.3.0) bare=() ;;
    # All that its package asks for are also kernels for GPUs and audio.
    automodel)
      packages=(torch==2.13.0 transformers==5.18.0 datasets torchdata 'torchao>=0.16' accelerate pillow)
      bare=(nemo-automodel==0.7.0 megatron-fsdp==0.5.0) ;;
  esac
  folder=$(realpath -m "${ENVIRONMENTS:-.}/.venv-$host")
  [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
  pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" "${packages[@]}" highspy pytest pytest-timeout
  [ ${#bare[@]} -eq 0 ] || "${pip[@]}" --no-deps "${bare[@]}"
  echo "$host in $folder"
  PYTHONPATH=$PWD "$folder/bin/python" -m pytest --noconftest -q -s -m multiprocess tests/examples/test_hosts.py
done
