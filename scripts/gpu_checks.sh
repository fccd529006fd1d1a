#!/usr/bin/env bash
# Everything that waits for GPUs, in one go: tests marked gpu, the default run over NCCL, the paired benchmarks, every
# freezing method once, the memory estimate of the 1B model against measured peaks, and a model from its folder to its
# scores.
#
#   scripts/gpu_checks.sh [N_GPUS [MODEL ROWS QUESTIONS]]
#
# N_GPUS      default: all visible ones, 2 at least for the pipeline
# MODEL       Hugging Face folder of SmolLM2-135M-Instruct, to be fine-tuned without and with freezing and scored
# ROWS        file of its training rows: instruction, input, output
# QUESTIONS   folder of local questions, as for scripts/evaluate.sh --data-dir
#
# Prints markdown tables; copy them into docs/results.md with the hardware's name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh dev
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpus=${1:-$(nvidia-smi -L | grep -c '^GPU')}

.venv/bin/python -m pytest -m gpu tests/gpu
if [ "$gpus" -lt 2 ]; then
  echo "Only $gpus GPU is visible; a pipeline needs 2 or more. The pipeline checks were not run." >&2
  exit 0
fi
NGPU=$gpus ./run_train.sh --parallelism.pipeline_parallel_degree="$gpus" --training.mixed_precision_param=bfloat16
.venv/bin/python scripts/benchmark.py plain --ranks "$gpus" --schedules 1F1B
.venv/bin/python scripts/benchmark.py gain --ranks "$gpus" --first-stage all_or_nothing keep_chain \
  --training.mixed_precision_param=bfloat16
.venv/bin/python scripts/compare_methods.py run train_configs/compare_8m.toml outputs/gpu_comparison --nproc "$gpus" \
  --schedules 1F1B --methods none timelyfreeze apf autofreeze timelyfreeze+apf timelyfreeze+autofreeze pipetransformer \
  smartpipe fixed linear lisa -- --training.mixed_precision_param=bfloat16 --checkpoint.no-enable \
  --training.dataset_path=tests/assets/tiny_instruct --validation.dataset_path=tests/assets/tiny_instruct \
  --parallelism.pipeline_parallel_degree="$gpus"

# The 1B model from random weights, in the shapes of the paper's run: what the estimate says, and what the GPUs held.
for schedule in 1F1B GPipe ZBVZeroBubble; do
  keys=(--parallelism.pipeline_parallel_degree="$gpus" --parallelism.pipeline_parallel_schedule=$schedule
    --checkpoint.no-enable --checkpoint.no-initial_load_in_hf --training.global_batch_size=-1 --freezing.method=none
    --model.hf_assets_path=tests/assets/tokenizer --training.dataset_path=tests/assets/tiny_instruct)
  scripts/estimate_memory.sh train_configs/llama3_2_1b_alpaca_gpt4.toml -- "${keys[@]}"
  CONFIG_FILE=train_configs/llama3_2_1b_alpaca_gpt4.toml NGPU=$gpus ./run_train.sh "${keys[@]}" --training.steps=6 \
    --metrics.log_freq=1 --job.dump_folder="outputs/gpu_memory_$schedule"
  grep -h peak_memory_gib "outputs/gpu_memory_$schedule"/tb/*/summary.json
done

[ $# -ge 4 ] || exit 0
model=$2 rows=$3 questions=$4
scripts/setup.sh eval
.venv/bin/python scripts/compare_methods.py run train_configs/smollm2_alpaca_gpt4.toml outputs/gpu_smollm2 \
  --nproc "$gpus" --schedules 1F1B --methods none timelyfreeze timelyfreeze+apf autofreeze timelyfreeze+autofreeze \
  pipetransformer apf smartpipe lisa linear fixed --seeds 42 22 11 -- --training.steps=400 --validation.freq=50 \
  --checkpoint.interval=400 --lr_scheduler.warmup_steps=20 --freezing.last_warmup_step=20 \
  --freezing.last_monitor_step=40 --freezing.last_ramp_step=60 --model.hf_assets_path="$model" \
  --training.dataset_path="$rows" --validation.dataset_path="$rows"
scripts/evaluate.sh "$model" --data-dir "$questions" --output outputs/gpu_smollm2/before
for run in outputs/gpu_smollm2/1F1B/*/seed_42; do
  scripts/evaluate.sh "$run" --data-dir "$questions"
done
.venv/bin/python scripts/compare_methods.py table outputs/gpu_smollm2
