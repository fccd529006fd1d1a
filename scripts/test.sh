#!/usr/bin/env bash
# Runs the tests, in an environment made as run_train.sh makes it. Further arguments go to pytest.
#
#   scripts/test.sh           the suite: unit tests, then tests with several processes
#   scripts/test.sh unit      what needs one process and little time
#   scripts/test.sh long      what takes longest: more places, methods and schedules of the same tests
#   scripts/test.sh all       both
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  unit) marks="not multiprocess and not slow and not long and not gpu"; shift ;;
  long) marks="long and not gpu"; shift ;;
  all) marks="not gpu"; shift ;;
  *) marks="not long and not gpu" ;;
esac
scripts/setup.sh dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -m "$marks" --durations=10 "$@"
