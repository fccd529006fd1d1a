#!/usr/bin/env bash
# Makes the runs and the plots of docs/runs.md, again or on another machine.
#
# Usage: benchmarks/make_gallery.sh OUTPUT [-- --section.key=value ...]
#
# Trains the 8M model on 4 emulated ranks with and without freezing under each of four schedules, under 1F1B with apf and
# autofreeze as well, with egeria and the activation cache over few rows, and with a pipeline that becomes shorter, a minute or two
# a run on one core, JOBS of them at a time (default 2). Runs that OUTPUT has are not made again. Plots go to OUTPUT/gallery; copy those that pages show to docs/gallery once they
# have been looked at.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/usage.sh"
expect_options "" "$@"
[ $# -gt 0 ] && [ "$1" != -- ] || refuse "OUTPUT is missing"
output=$(realpath -m "$1")
[ ! -e "$output" ] || expect_first -d OUTPUT "$output"
shift
[ $# -eq 0 ] || [ "$1" = -- ] || refuse "'$1' follows OUTPUT; arguments of the runs come after --"
[ $# -eq 0 ] || shift
[[ ${JOBS:-2} =~ ^[1-9][0-9]{0,3}$ ]] || refuse "JOBS is '$JOBS'; it must be a number, 1 or more"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python
mkdir -p "$output/gallery"
# A device for each rank is what an emulation is about: one thread, as a core has.
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
schedules=(GPipe 1F1B Interleaved1F1B ZBVZeroBubble)

train() {
  local folder=$output/$1/$3 schedule=$2 method=$3
  shift 3
  if compgen -G "$folder/tb/*/summary.json" > /dev/null; then
    return
  fi
  rm -rf "$folder"
  mkdir -p "$folder"
  echo "$schedule $method"
  if ! "$python" -m timelyfreeze train train_configs/prediction_8m.toml --nproc 1 --job.dump_folder="$folder" \
    --emulation.enable --metrics.enable_tensorboard --metrics.log_freq=4 --parallelism.pipeline_parallel_degree=4 \
    "--parallelism.pipeline_parallel_schedule=$schedule" "--freezing.method=$method" "$@" > "$folder/train.log" 2>&1; then
    echo "error: $schedule with $method failed; see $folder/train.log" >&2
    return 1
  fi
}

wait_for_room() {
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-2}" ]; do
    wait -n
  done
}

for schedule in "${schedules[@]}"; do
  for method in none timelyfreeze; do
    wait_for_room
    train "$schedule" "$schedule" "$method" --training.steps=64 "$@" &
  done
done
# Their checks come often, because the run is short.
for method in apf autofreeze; do
  wait_for_room
  train others 1F1B "$method" --training.steps=64 --freezing.apf.check_interval=2 --freezing.apf.threshold=0.8 \
    --freezing.autofreeze.check_interval=4 "$@" &
done
# An epoch of 4 steps, so that rows come again before the front grows; the reference inline, so that the run can be repeated.
mkdir -p "$output/rows"
head -n 32 tests/assets/tiny_instruct/train.jsonl > "$output/rows/train.jsonl"
wait_for_room
train front 1F1B egeria --training.steps=128 --training.dataset_path="$output/rows" --freezing.cache.enable \
  --freezing.egeria.check_interval=2 --freezing.egeria.window=6 --freezing.egeria.stale=4 --freezing.egeria.tolerance=0.25 \
  --freezing.egeria.reference=inline --freezing.egeria.unfreeze_at=0 --freezing.egeria.unfreeze_steps=88 "$@" &
wait_for_room
train elastic 1F1B linear --freezing.elastic.enable --training.steps=40 --freezing.last_warmup_step=4 \
  --freezing.linear.check_interval=10 --freezing.linear.layers_per_check=4 --freezing.linear.max_layers=8 "$@" &
while [ -n "$(jobs -p)" ]; do
  wait -n
done

for schedule in "${schedules[@]}"; do
  run=$(dirname "$(compgen -G "$output/$schedule/timelyfreeze/tb/*/summary.json" | head -n 1)")
  for plot in timeline_measured timeline_predicted; do
    cp "$run/plots/$plot.png" "$output/gallery/${schedule}_$plot.png"
  done
  if [ "$schedule" = 1F1B ]; then
    for plot in curves loss convergence response histogram; do
      cp "$run/plots/$plot.png" "$output/gallery/$plot.png"
    done
  fi
done
cp "$(dirname "$(compgen -G "$output/front/egeria/tb/*/summary.json" | head -n 1)")/plots/front.png" "$output/gallery/front.png"
cp "$(dirname "$(compgen -G "$output/elastic/linear/tb/*/summary.json" | head -n 1)")/plots/timeline_measured.png" \
  "$output/gallery/elastic_timeline_measured.png"
"$python" -m timelyfreeze compare show "${schedules[@]/#/$output/}" --output "$output/comparison" --title "Four schedules"
for plot in freeze_ratio_steps freeze_ratio_stages; do
  cp "$output/comparison/$plot.png" "$output/gallery/comparison_$plot.png"
done
"$python" -m timelyfreeze compare show "$output/1F1B" "$output/others" --output "$output/methods" --title "Four methods"
for plot in timelines freeze_ratio_histogram; do
  cp "$output/methods/$plot.png" "$output/gallery/methods_$plot.png"
done
ls -l "$output/gallery"
