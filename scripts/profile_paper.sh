#!/usr/bin/env bash
# Profiles the paper's language models on one GPU, in 4 stages and in 8, and plans their schedules at r_max 0.8.
#
#   scripts/profile_paper.sh [FOLDER]      default: outputs/profile_paper
#
# One device of 40 GB or more. The bounds files are small: keep them, and anyone can plan from them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-outputs/profile_paper}

for model in llama3_2_1b_alpaca_gpt4 llama3_8b_openhermes; do
  for schedule in 1F1B ZBVZeroBubble; do
    scripts/profile_stages.sh "train_configs/$model.toml" --output "$folder/${model}_$schedule" -- \
      --parallelism.pipeline_parallel_schedule="$schedule"
  done
  # Each schedule from stages as it has them: one a rank, or two.
  .venv/bin/python -m timelyfreeze plan "$folder/${model}_1F1B/bounds.json" --schedules GPipe 1F1B \
    --splits default balanced --json "$folder/${model}_single.json"
  .venv/bin/python -m timelyfreeze plan "$folder/${model}_ZBVZeroBubble/bounds.json" \
    --schedules Interleaved1F1B ZBVZeroBubble --splits default balanced --json "$folder/${model}_double.json"
done
