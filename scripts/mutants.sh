#!/usr/bin/env bash
# Puts small faults into a copy of the sources, one at a time, and says which of them no test sees.
#
#   scripts/mutants.sh           all of tests/tools/mutants.toml
#   scripts/mutants.sh lp.py     those whose name or file has one of the words
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python dev
exec "$python" -m tests.tools.mutants "$@"
