#!/usr/bin/env bash
# Runs the tests, in an environment made as run_train.sh makes it. Further arguments go to pytest.
#
#   scripts/test.sh           the suite: unit tests, then tests with several processes
#   scripts/test.sh unit      what needs one process and little time
#   scripts/test.sh long      what takes longest: more places, methods and schedules of the same tests
#   scripts/test.sh all       the suite and the long ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  unit) marks="not multiprocess and not slow and not long and not gpu"; shift ;;
  long) marks="long and not gpu"; shift ;;
  all) marks="not gpu"; shift ;;
  *) marks="not long and not gpu" ;;
esac
source scripts/environment.sh
choose_python dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0 chosen=no
run() {
  local result=0
  "$python" -m pytest --durations=10 "$@" || result=$?
  case $result in
    0) chosen=yes ;;
    5) ;; # nothing was chosen, which one of the two parts may be
    *) chosen=yes status=$result ;;
  esac
}
# A process for each core, but for tests that start several of their own.
run -m "$marks and not multiprocess" --numprocesses=auto --dist=loadfile "$@"
run -m "$marks and multiprocess" "$@"
[ $chosen = yes ] || status=5
exit $status
