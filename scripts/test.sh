#!/usr/bin/env bash
# Runs the tests, in an environment made as run_train.sh makes it. Further arguments go to pytest.
#
#   scripts/test.sh           the suite: tests of one process, then those of several
#   scripts/test.sh unit      what needs one process and little time
#   scripts/test.sh long      what takes longest: more places, methods and schedules of the same tests
#   scripts/test.sh all       the suite, the long ones with thousands of random inputs, scripts/mutants.sh, and benchmarks/claims.toml
#                             as far as an hour on two cores allows
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=suite
case ${1:-} in
  unit) what=unit marks="not multiprocess and not slow and not long and not gpu"; shift ;;
  long) marks="long and not gpu"; shift ;;
  all) what=all marks="not gpu"; shift ;;
  *) marks="not long and not gpu" ;;
esac
source scripts/environment.sh
# Hundreds of processes import the same modules, which are compiled once if that may be kept.
unset PYTHONDONTWRITEBYTECODE
choose_python dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ $what != all ] || export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-long}
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
places=()
if [ $part_1$part_2 = nono ]; then
  part_1=yes part_2=yes
  # Collecting all tests takes a while: those of the second part stand in few files.
  mapfile -t places < <(grep -rl --include='*.py' 'mark\.multiprocess' tests)
  places+=(tests/multiprocess)
fi
[ $what != unit ] || part_2=no
# Tests take about three times as long beside other work.
tell_load() {
  local load cores
  read -r load _ < /proc/loadavg
  cores=$(env -u OMP_NUM_THREADS nproc) # which counts no more than that
  if awk "BEGIN { exit !($load > $cores) }"; then
    echo "This machine is busy: a load of $load on $cores cores. Tests may take three times as long."
  fi
}
status=0 chosen=no took=()
tell_load
run() {
  local name=$1 result=0 begun=$SECONDS
  "$python" -m pytest --durations=10 --junitxml=".pytest_cache/$name.xml" "${@:2}" || result=$?
  case $result in
    0) chosen=yes ;;
    5) ;; # nothing was chosen, which one of the two parts may be
    *) chosen=yes status=$result ;;
  esac
  took+=(" $name $((SECONDS - begun))")
}
# A process for each core, but for tests that start several of their own: two of those beside each
# other take longer than one after the other.
one=one_process
[ $what != unit ] || one=unit
[ $part_1 = no ] || run $one -m "$marks and not multiprocess" --numprocesses=auto --dist=worksteal "$@"
[ $part_2 = no ] || run several_processes -m "$marks and multiprocess" "${places[@]}" "$@"
[ $chosen = yes ] || status=5
if [ $what = all ] && [ $# -eq 0 ]; then
  scripts/mutants.sh || status=1
  "$python" -m benchmarks.claims --within 60 || status=1
fi
(IFS=";"; echo "Seconds of each part:${took[*]}")
tell_load
exit $status
