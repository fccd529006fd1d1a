#!/usr/bin/env bash
# Checks style and types: ruff on everything, mypy on the library.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
[ $# -eq 0 ] || refuse "'$1': it takes no argument"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
