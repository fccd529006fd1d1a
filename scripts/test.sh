#!/usr/bin/env bash
# Runs the whole test suite, in an environment made as run_train.sh makes it. Arguments go to pytest.
#
#   scripts/test.sh                 unit tests, then tests with several processes (about 40 minutes on 2 cores)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -m "${TEST_MARKS:-not gpu}" --durations=10 "$@"
