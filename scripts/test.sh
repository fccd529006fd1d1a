#!/usr/bin/env bash
# Runs the tests, in an environment made as run_train.sh makes it. Further arguments go to pytest.
#
#   scripts/test.sh           the suite: unit tests, then tests with several processes
#   scripts/test.sh unit      what needs one process and little time
#   scripts/test.sh long      what takes longest: more places, methods and schedules of the same tests
#   scripts/test.sh ci        the suite, and those long ones that no shorter one stands in for
#   scripts/test.sh all       the suite and the long ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  unit) marks="not multiprocess and not slow and not long and not gpu"; shift ;;
  long) marks="long and not gpu"; shift ;;
  ci) marks="(not long or ci) and not gpu"; shift ;;
  all) marks="not gpu"; shift ;;
  *) marks="not long and not gpu" ;;
esac
source scripts/environment.sh
choose_python dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Which of the two parts below have tests in the files and folders that are named? The other is
# left out: pytest would say at the end that it has found nothing.
part_1=no part_2=no
for argument in "$@"; do
  path=${argument%%::*}
  [ -e "$path" ] || continue
  case ${path#./} in
    tests/multiprocess*) part_2=yes ;;
    *)
      part_1=yes
      if grep -rqs --include='*.py' 'mark\.multiprocess' "$path"; then part_2=yes; fi
      ;;
  esac
done
[ $part_1$part_2 != nono ] || part_1=yes part_2=yes
case $marks in "not multiprocess"*) part_2=no ;; esac
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
[ $part_1 = no ] || run -m "$marks and not multiprocess" --numprocesses=auto --dist=worksteal "$@"
[ $part_2 = no ] || run -m "$marks and multiprocess" "$@"
[ $chosen = yes ] || status=5
exit $status
