#!/usr/bin/env bash
# Runs the tests of what depends on torch with another torch than that of constraints.txt.
#
# Usage: scripts/test_torch.sh VERSION [FOLDER]
# VERSION is one that pip knows, as 2.15.0. FOLDER is the environment, made on first use: .venv-torch-VERSION, of up to
# 6 GB, since the package index has torch for CUDA alone. pip's own settings (index, proxies, caches) are respected.
# PYTHON=/path/to/python chooses the interpreter, 3.11 or 3.12
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
[ $# -gt 0 ] || refuse "VERSION is missing"
[ $# -le 2 ] || refuse "'$3' follows FOLDER"
version=$1
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "VERSION is '$version', which is no release such as 2.15.0"
folder=$(realpath -m "${2:-$(dirname "${BASH_SOURCE[0]}")/../.venv-torch-$version}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
python=$folder/bin/python
# All else is as it is tested every day.
grep -vE '^(torch|torchvision|triton)==' constraints.txt > "$folder/constraints.txt"
"$python" -m pip install --quiet --disable-pip-version-check -c "$folder/constraints.txt" "torch==$version" -e '.[titan,dev]'
# A torch that is not known yet is refused otherwise; the tests of its names then say what has moved.
export TIMELYFREEZE_PYTHON=$python
TIMELYFREEZE_UNTESTED_TORCH=$("$python" -c 'import torch; print(torch.__version__)')
export TIMELYFREEZE_UNTESTED_TORCH
echo "torch $TIMELYFREEZE_UNTESTED_TORCH in $folder"
exec scripts/test.sh tests/timelyfreeze/runtime tests/timelyfreeze/control \
  tests/timelyfreeze/test_api.py tests/timelyfreeze/test_api_cache.py tests/timelyfreeze/test_api_slips.py tests/examples \
  tests/multiprocess/gradients tests/multiprocess/runs/test_library.py
