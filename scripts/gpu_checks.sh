#!/usr/bin/env bash
# Everything that waits for GPUs, in parts; each can be run alone.
#
#   scripts/gpu_checks.sh [OPTIONS] [PART ...]      default: every part that the machine and the options allow,
#                                                   in this order
#
#   short      one GPU of 80 GB, 8 minutes: probe, runs_8b, runs_1b, tests and compiled, each within a time of its own;
#              what fails, or takes longer, keeps nothing else from running
#   probe      a block of 1B and of 8B: exact, at rank 32, with nothing, by LoRA; times, kernels, what it saves
#   runs_8b    a quarter of the layers and of the vocabulary of Llama-3-8B, 4 ranks in one process, 30 steps of four
#              batches: none, rank 32, lora; predicted and measured, share of the peak. Each stage takes a quarter of its
#              time, so the plans are those of 8B
#   runs_1b    Llama-3.2-1B likewise, microbatches of 2 x 1024 tokens
#   tests      what is marked gpu
#   compiled   runs_8b in compiled blocks, a batch a step, without lora
#   paper_1b   training steps of Llama-3.2-1B, 4 ranks in one process (80 GB), at r_max 0.8: by the paper's method
#              beside the paper's numbers, and by our defaults; predicted and measured
#   paper_8b   the same with the quarter of Llama-3-8B (80 GB)
#   pipeline   two GPUs or more: the default run over NCCL, the paired benchmarks, every freezing method once
#   real       two GPUs or more: Llama-3.2-1B and Llama-3-8B from random weights over NCCL, 60 steps: none, rank 32, lora;
#              predicted and measured; and the same model by FSDP2 alone on the same GPUs
#   emulate    training steps of SmolLM2-135M, 4 ranks in one process: predicted and measured
#   profile    Llama-3.2-1B and Llama-3-8B in the paper's shapes, in 4 and in 8 stages, one stage at a time (40 GB are
#              enough); plans of the paper's four schedules at r_max 0.8, beside the paper's numbers
#   memory     two GPUs or more: Llama-3.2-1B from random weights, the estimate, and what the GPUs held
#   scores     two GPUs or more: SmolLM2-135M-Instruct, fine-tuned without and with freezing, and scored; needs --model,
#              --examples and --questions
#
#   --gpus N             default: all visible ones
#   --output FOLDER      default: outputs/gpu_checks; what is there already is not run again by paper_*, emulate and scores
#   --model FOLDER       Hugging Face folder of SmolLM2-135M-Instruct; emulate begins from random weights without it
#   --examples FILE      its training examples: instruction, input, output
#   --questions FOLDER   local questions, as for timelyfreeze evaluate --data-dir
#   --keys KEYS          of runs_* and compiled, in one word with spaces: keys that win over theirs, as --data.packing
#   --schedules NAMES    of paper_*, in one word with spaces; default: the paper's four
#   --tree FOLDER        of runs_* and compiled: another commit's code, to compare with
#   --wheels FOLDER      for a machine without a network: wheels of what its Python lacks beside torch. They go to a
#                        temporary folder; TIMELYFREEZE_PYTHON, or python3, runs with it. FOLDER/pipelining, if there,
#                        stands in for torch/distributed/pipelining of a torch before 2.13
#   --small              the same commands with a tiny model and few steps, without a GPU too: to see that all of it
#                        works before GPUs are rented
#
# Prints markdown tables; copy them into files of docs/results with the hardware's name. The folders in OUTPUT/profile without
# settings.json go to profiles/, so that anyone can plan from them. TIMELYFREEZE_PYTHON names a Python other than that
# of .venv.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"

fail() {
  echo "error: $1" >&2
  exit 2
}

gpus='' output=outputs/gpu_checks model='' examples='' questions='' small='' tree='' wheels='' parts=()
schedules=(GPipe 1F1B Interleaved1F1B ZBVZeroBubble) more=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage 0 ;;
    --small) small=yes ;;
    --gpus | --output | --model | --examples | --questions | --schedules | --keys | --tree | --wheels)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --gpus) gpus=$2 ;;
        --schedules) read -ra schedules <<<"$2" ;;
        --output) output=$(realpath -m "$2") ;;
        --model) model=$(realpath -m "$2") ;;
        --examples) examples=$(realpath -m "$2") ;;
        --questions) questions=$(realpath -m "$2") ;;
        --keys) read -ra more <<<"$2" ;;
        --tree) tree=$(realpath -m "$2") ;;
        --wheels) wheels=$(realpath -m "$2") ;;
      esac
      shift
      ;;
    short | probe | runs_8b | runs_1b | tests | compiled | paper_1b | paper_8b) parts+=("$1") ;;
    pipeline | real | emulate | profile | memory | scores) parts+=("$1") ;;
    *) refuse "'$1' is no part and no option" ;;
  esac
  shift
done
[ -z "$model" ] || [ -d "$model" ] || fail "--model is '$model', which is no folder"
[ -z "$examples" ] || [ -e "$examples" ] || fail "--examples is '$examples', which is neither a file nor a folder"
[ -z "$questions" ] || [ -d "$questions" ] || fail "--questions is '$questions', which is no folder"
[ -z "$tree" ] || [ -d "$tree" ] || fail "--tree is '$tree', which is no folder"
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "--wheels is '$wheels', which is no folder"
[ ! -e "$output" ] || [ -d "$output" ] || fail "--output is '$output', which is no folder"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "$gpus" ]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  [ -z "$small" ] || gpus=$(( gpus > 2 ? gpus : 2 ))
fi
[[ $gpus =~ ^[0-9]+$ ]] || fail "--gpus is '$gpus'; it must be a number"
[ "$gpus" -gt 0 ] || fail "no GPU is visible; --small tries everything without one"
if [ -n "$model" ] && [ -z "$examples" ]; then
  fail "--model is given and --examples is not; it needs examples to be trained on"
fi
if [ ${#parts[@]} -eq 0 ]; then
  # A whole model with its optimizer, and all microbatches of GPipe.
  memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1 || true)
  if [ -n "$small" ] || [ "${memory_mib:-0}" -ge 75000 ]; then
    parts=(short paper_1b paper_8b)
  else
    parts=(probe tests)
    echo "The first GPU has ${memory_mib:-0} MiB; runs_*, compiled and paper_* need 80 GB and are left out." >&2
  fi
  if [ "$gpus" -ge 2 ]; then
    parts+=(pipeline real emulate profile memory)
    [ -z "$questions" ] || parts+=(scores)
  else
    parts+=(emulate profile)
    echo "One GPU is visible; pipeline, real, memory and scores need 2 or more and are left out." >&2
  fi
fi
for part in "${parts[@]}"; do
  case $part in
    pipeline | real | memory) [ "$gpus" -ge 2 ] || fail "$part needs 2 GPUs or more; $gpus is visible" ;;
    scores)
      [ "$gpus" -ge 2 ] || fail "$part needs 2 GPUs or more; $gpus is visible"
      [ -n "$model" ] && [ -n "$questions" ] || fail "$part needs --model, --examples and --questions"
      ;;
  esac
done
source scripts/environment.sh
[ -z "$wheels" ] || export TIMELYFREEZE_PYTHON=${TIMELYFREEZE_PYTHON:-python3}
choose_python dev
mkdir -p "$output"
tree=${tree:-$PWD} packages=''
if [ -n "$wheels" ]; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$packages" "$wheels"/*.whl
  # In a folder of PYTHONPATH Python reads no .pth files, but runs this. The torch that is there stays as it is.
  cat >"$packages/sitecustomize.py" <<END
import sys
from importlib.machinery import PathFinder

from timelyfreeze.cli import overlay


class Newer:
    def find_spec(self, name, path, target=None):
        return PathFinder.find_spec(name, ["$wheels"]) if name == "torch.distributed.pipelining" else None


sys.meta_path.insert(0, Newer())
overlay.install()
END
  TIMELYFREEZE_UNTESTED_TORCH=$("$python" -c 'import torch; print(torch.__version__)')
  export TIMELYFREEZE_UNTESTED_TORCH PYTHONPATH=$PWD:$packages
fi

# Keys of the trainer that --small puts last, so that they win.
tiny=() few=() short=() eager=()
if [ -n "$small" ]; then
  # Many CPUs multiply in bfloat16 ten times as slowly as in float32.
  tiny=(--model.flavor=8M --training.seq_len=64 --training.mixed_precision_param=float32)
  few=(--training.steps=14 --lr_scheduler.warmup_steps=2 --freezing.last_warmup_step=2 --freezing.last_monitor_step=8
    --freezing.last_ramp_step=10 --freezing.discard_batches=1 --metrics.log_freq=1)
  short=("${tiny[@]}" "${few[@]}" --training.global_batch_size=-1) eager=(--compile.backend=aot_eager)  # whose compiling takes no minutes
fi
# TorchTitan's own split: that of the SmolLM2 configuration is for 4 stages and a CPU's times.
own_split=(--parallelism.pipeline_parallel_first_stage_less_layers=1 --parallelism.pipeline_parallel_last_stage_less_layers=1)
random_weights=(--checkpoint.no-enable --checkpoint.no-initial_load_in_hf --model.hf_assets_path=tests/assets/tokenizer
  --training.dataset_path=tests/assets/tiny_instruct)

config_1b=paper_llama3_2_1b config_8b=paper_llama3_8b

timelyfreeze() {
  "$python" -m timelyfreeze "$@"
}

# A batch a step, 10 steps of each bound and some 20 under the plan.
paper_keys=(--training.dataset=alpaca "${random_weights[@]}" --training.global_batch_size=-1 --training.steps=46
  --lr_scheduler.warmup_steps=6 --freezing.last_warmup_step=6 --freezing.last_monitor_step=26
  --freezing.last_ramp_step=27 --freezing.discard_batches=2 --metrics.log_freq=1 --plots.no_enable)
# Padding counts as it does under the paper's preset, so that throughputs compare.
by_defaults=(--emulation.enable --freezing.max_freeze_ratio=0.8 --freezing.preset= --report.count_padding)

# paper_runs TABLE CONFIG [KEYS ...]
paper_runs() {
  local folder=$output/paper_$1 keys=("${paper_keys[@]}" "${@:3}" "${short[@]}")
  timelyfreeze paper table "$1" "$folder" --emulate --methods timelyfreeze --schedules "${schedules[@]}" --seeds 42 \
    -- "${keys[@]}"
  timelyfreeze compare run "train_configs/$2.toml" "$folder/defaults" --methods timelyfreeze \
    --schedules "${schedules[@]}" --seeds 42 -- "${by_defaults[@]}" "${keys[@]}" >"$folder/defaults.log"
  timelyfreeze compare show "$folder" --table
}

run_paper_1b() {
  paper_runs 4 "$config_1b"
}

quarter=$output/quarter_of_8b

make_quarter() {
  mkdir -p "$quarter"
  cp tests/assets/tokenizer/* "$quarter"
  cat >"$quarter/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
 "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 8, "vocab_size": 32064,
 "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
 "tie_word_embeddings": false}
END
}

run_paper_8b() {
  make_quarter
  paper_runs 1 "$config_8b" --model.flavor=hf --model.hf_assets_path="$quarter"
}

failed='' status=0

# within SECONDS COMMAND ...: what fails is told and remembered, and the next command runs. Sets status.
within() {
  local began=$SECONDS limit=$1
  status=0
  [ -z "$small" ] || limit=2400
  timeout -k 5 "$limit" "${@:2}" || status=$?
  [ $status -eq 0 ] || failed=yes
  echo "-- $((SECONDS - began)) s, status $status"
}

# in_turn SECONDS NAME CONFIG [KEYS ...] [:: METHOD [KEYS ...]] ...: emulated runs, all in one process, whose start takes as
# long as some of them. A row is printed as soon as a run ends; its log is in OUTPUT/NAME.
in_turn() {
  local folder=$output/$2 config=$PWD/train_configs/$3.toml place=$PWD
  mkdir -p "$folder"
  cat >"$folder/in_turn.py" <<'END'
import gc, json, os, sys, time, traceback
from pathlib import Path
from timelyfreeze.cli import overlay
from timelyfreeze.cli.train import DEFAULTS

overlay.install()
alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ.update({**alone, **DEFAULTS, **os.environ})
import torch
from torchtitan.freezing.launch import launch

NAMES = ("virtual_step_ms", "batch_ms", "batch_ms_predicted", "mfu_percent", "virtual_tokens_per_second", "step_ms",
         "peak_memory_gib", "gradient_rank", "average_freeze_ratio")
groups = [[]]
for word in sys.argv[2:]:
    groups.append([]) if word == "::" else groups[-1].append(word)
common, *runs = groups
rows = os.fdopen(3, "w", buffering=1)
rows.write(f"| run | {' | '.join(NAMES)} | whole run, s |\n{'| --- ' * (len(NAMES) + 2)}|\n")
failed = False
for number, (method, *keys) in enumerate(runs):
    began, folder = time.monotonic(), Path(sys.argv[1]) / f"{number}_{method}"
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        launch([*common, f"--freezing.method={method}", f"--job.dump_folder={folder}", *keys], local_rank=0)
    except Exception:
        traceback.print_exc()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = sorted(folder.glob("tb/*/summary.json"))
    failed |= not found
    told = json.loads(found[-1].read_text()) if found else {}
    cells = ("" if told.get(name) is None else f"{told[name]:,.2f}" for name in NAMES)
    rows.write(f"| {' '.join([method, *keys])} | {' | '.join(cells)} | {time.monotonic() - began:.0f} |\n")
sys.exit(failed)
END
  cd "$tree"
  PYTHONPATH=$tree:$packages within "$1" "$python" "$folder/in_turn.py" "$folder" --job.config_file="$config" "${@:4}" \
    3>&1 >"$folder/log.txt" 2>&1
  cd "$place"
  tail -n $((status ? 40 : 1)) "$folder/log.txt"
}

# 30 steps: 4 of warm-up, 7 of each bound, the last 11 under the plan.
short_keys=(--emulation.enable --freezing.preset= --report.count_padding --training.dataset=alpaca "${random_weights[@]}"
  --training.steps=30 --lr_scheduler.warmup_steps=4 --freezing.last_warmup_step=4 --freezing.last_monitor_step=18
  --freezing.last_ramp_step=19 --freezing.discard_batches=2 --metrics.log_freq=10 --freezing.gradient_rank=32
  --freezing.max_freeze_ratio=1.0 --plots.no_enable)
shapes_8b=(--model.flavor=hf --model.hf_assets_path="$quarter" --training.local_batch_size=32
  --parallelism.pipeline_parallel_microbatch_size=4)

run_probe() {
  local options=(--ranks 32)
  [ -z "$small" ] || options=(--models 8M --rows 2 --tokens 8 --ranks 16 --repeats 1 --dtype float32)
  within 100 "$python" benchmarks/block_cost.py "${options[@]}"
}

run_runs_8b() {
  make_quarter
  in_turn 150 runs_8b "$config_8b" "${short_keys[@]}" "${shapes_8b[@]}" --training.global_batch_size=128 \
    "${short[@]}" "${more[@]}" :: none :: timelyfreeze :: lora
}

run_runs_1b() {
  in_turn 100 runs_1b "$config_1b" "${short_keys[@]}" --training.global_batch_size=64 "${short[@]}" "${more[@]}" \
    :: none :: timelyfreeze :: lora
}

run_compiled() {
  make_quarter
  in_turn 150 compiled "$config_8b" "${short_keys[@]}" "${shapes_8b[@]}" --training.global_batch_size=-1 \
    --compile.enable "${eager[@]}" "${short[@]}" "${more[@]}" :: none :: timelyfreeze
}

run_short() {
  local each
  for each in probe runs_8b runs_1b tests compiled; do
    echo "== short: $each"
    "run_$each"
  done
}

run_tests() {
  within 60 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu
}

run_profile() {
  local table config plans options=()
  [ -z "$small" ] || options=(--warmup 1 --repeats 2 --ratios 0.5)
  for table in 4:paper_llama3_2_1b 1:paper_llama3_8b; do
    config=${table#*:} table=${table%%:*}
    for schedule in 1F1B ZBVZeroBubble; do
      timelyfreeze profile "train_configs/$config.toml" --output "$output/profile/${config}_$schedule" \
        "${options[@]}" -- --parallelism.pipeline_parallel_schedule="$schedule" "${tiny[@]}"
    done
    # Each schedule from stages as it has them: one a rank, or two.
    plans=("$output/profile/${config}_1F1B/plan.json" "$output/profile/${config}_ZBVZeroBubble/plan.json")
    timelyfreeze plan "$output/profile/${config}_1F1B/bounds.json" --schedules GPipe 1F1B \
      --splits default balanced --json "${plans[0]}"
    timelyfreeze plan "$output/profile/${config}_ZBVZeroBubble/bounds.json" \
      --schedules Interleaved1F1B ZBVZeroBubble --splits default balanced --json "${plans[1]}"
    timelyfreeze paper table "$table" --plans "${plans[@]}" | tee "$output/profile/$config.md"
    # The same where frozen weights still learn.
    timelyfreeze profile "train_configs/$config.toml" --output "$output/profile/${config}_rank_32" \
      "${options[@]}" -- --freezing.preset= --freezing.gradient_rank=32 "${tiny[@]}"
    timelyfreeze plan "$output/profile/${config}_rank_32/bounds.json" --schedules 1F1B --r-max 0.75 1
  done
}

run_emulate() {
  local schedules=(GPipe 1F1B Interleaved1F1B ZBVZeroBubble) weights=("${random_weights[@]}" --data.chat_template=plain)
  # 8 microbatches of 2 x 1024 tokens, a batch a step, 15 steps of each bound and some 50 under the plan.
  local keys=(--training.local_batch_size=16 --parallelism.pipeline_parallel_microbatch_size=2 --training.seq_len=1024
    --training.global_batch_size=-1 --training.steps=100 --lr_scheduler.warmup_steps=10 --freezing.last_warmup_step=10
    --freezing.last_monitor_step=40 --freezing.last_ramp_step=44 --freezing.discard_batches=2 --freezing.monitoring=halves "${own_split[@]}")
  # Weights are read and nothing is saved, so that no run goes on from another.
  [ -z "$model" ] || weights=(--model.hf_assets_path="$model" --training.dataset_path="$examples" --checkpoint.load_only)
  if [ -n "$small" ]; then
    schedules=(1F1B ZBVZeroBubble) weights=("${random_weights[@]}" --data.chat_template=plain)
  fi
  timelyfreeze estimate train_configs/smollm2_alpaca_gpt4.toml --schedules "${schedules[@]}" -- --emulation.enable \
    "${weights[@]}" "${keys[@]}" "${tiny[@]}"
  timelyfreeze compare run train_configs/smollm2_alpaca_gpt4.toml "$output/emulate" --methods timelyfreeze \
    --schedules "${schedules[@]}" --seeds 42 -- --emulation.enable --freezing.max_freeze_ratio=0.8 \
    --validation.no-enable "${weights[@]}" "${keys[@]}" "${short[@]}"
}

run_pipeline() {
  local methods=(none timelyfreeze apf autofreeze timelyfreeze+apf timelyfreeze+autofreeze pipetransformer smartpipe
    egeria fixed linear lisa)
  local bf16=(--training.mixed_precision_param=bfloat16)
  local schedules=(GPipe 1F1B Interleaved1F1B ZBVZeroBubble) modes=all_or_nothing,per_tensor
  [ -z "$small" ] || methods=(none timelyfreeze) schedules=(1F1B) modes=all_or_nothing
  timelyfreeze train train_configs/tiny_8m.toml --nproc "$gpus" --job.dump_folder="$output/default" \
    --parallelism.pipeline_parallel_degree="$gpus" "${bf16[@]}" "${short[@]}"
  timelyfreeze compare run train_configs/tiny_8m.toml "$output/gain" --nproc "$gpus" --schedules "${schedules[@]}" \
    --methods none timelyfreeze --vary "freezing.first_stage=$modes" -- --freezing.max_freeze_ratio=0.8 \
    --parallelism.pipeline_parallel_degree="$gpus" "${bf16[@]}" "${short[@]}"
  "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" benchmarks/plain.py \
    ${small:+--blocks 1 --steps 1 --training.seq_len=64}
  timelyfreeze compare run train_configs/compare_8m.toml "$output/comparison" --nproc "$gpus" \
    --schedules 1F1B --methods "${methods[@]}" -- "${bf16[@]}" --checkpoint.no-enable \
    --training.dataset_path=tests/assets/tiny_instruct --validation.dataset_path=tests/assets/tiny_instruct \
    --parallelism.pipeline_parallel_degree="$gpus" "${few[@]}" ${small:+--training.seq_len=64 --validation.no-enable}
}

run_real() {
  local config keys rows=$((gpus < 16 ? 16 / gpus : 1))
  for config in "$config_1b" "$config_8b"; do
    keys=("${paper_keys[@]}" --freezing.preset= --report.count_padding --training.steps=60 "${short[@]}")
    timelyfreeze compare run "train_configs/$config.toml" "$output/real/$config" --nproc "$gpus" --schedules 1F1B \
      --methods none timelyfreeze lora -- --freezing.gradient_rank=32 --freezing.max_freeze_ratio=1.0 "${keys[@]}"
    # As many rows a step; each GPU has all layers' part of its own ones.
    timelyfreeze train "train_configs/$config.toml" --nproc "$gpus" "${keys[@]}" --freezing.method=none \
      --parallelism.pipeline_parallel_degree=1 --parallelism.data_parallel_shard_degree="$gpus" \
      --training.local_batch_size="$rows" --job.dump_folder="$output/real/${config}_fsdp"
    echo "FSDP2 alone:"
    grep -hE '"(tokens_per_second|step_ms|mfu_percent|peak_memory_gib)"' "$output/real/${config}_fsdp"/tb/*/summary.json
  done
}

run_memory() {
  local schedules=(1F1B GPipe ZBVZeroBubble) keys
  [ -z "$small" ] || schedules=(1F1B)
  for schedule in "${schedules[@]}"; do
    keys=(--parallelism.pipeline_parallel_degree="$gpus" --parallelism.pipeline_parallel_schedule="$schedule"
      --training.global_batch_size=-1 --freezing.method=none "${random_weights[@]}" "${tiny[@]}")
    timelyfreeze estimate train_configs/paper_llama3_2_1b.toml -- "${keys[@]}"
    timelyfreeze train train_configs/paper_llama3_2_1b.toml --nproc "$gpus" "${keys[@]}" --training.steps=6 \
      --lr_scheduler.warmup_steps=2 --metrics.log_freq=1 --job.dump_folder="$output/memory_$schedule"
    grep -h peak_memory_gib "$output/memory_$schedule"/tb/*/summary.json
  done
}

run_scores() {
  [ -n "${TIMELYFREEZE_PYTHON:-}" ] || scripts/setup.sh eval
  timelyfreeze compare run train_configs/smollm2_alpaca_gpt4.toml "$output/smollm2" \
    --nproc "$gpus" --schedules 1F1B --methods none timelyfreeze timelyfreeze+apf autofreeze timelyfreeze+autofreeze \
    pipetransformer apf smartpipe lisa linear fixed --seeds 42 22 11 -- --training.steps=400 --validation.freq=50 \
    --checkpoint.interval=400 --lr_scheduler.warmup_steps=20 --freezing.last_warmup_step=20 \
    --freezing.last_monitor_step=40 --freezing.last_ramp_step=60 --model.hf_assets_path="$model" \
    --training.dataset_path="$examples" --validation.dataset_path="$examples" \
    --parallelism.pipeline_parallel_degree="$gpus" "${own_split[@]}"
  timelyfreeze evaluate "$model" --data-dir "$questions" --output "$output/smollm2/before"
  for run in "$output"/smollm2/1F1B/*/seed_42; do
    timelyfreeze evaluate "$run" --data-dir "$questions"
  done
  timelyfreeze compare show "$output/smollm2" --output "$output/smollm2/comparison"
}

for part in "${parts[@]}"; do
  echo "== $part"
  "run_$part"
done
[ -z "$failed" ] || exit 1
