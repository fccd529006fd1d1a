#!/usr/bin/env bash
# Checks style and types: ruff on everything, mypy on both packages.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
[ $# -eq 0 ] || refuse "'$1': it takes no argument"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python dev
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
