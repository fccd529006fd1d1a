#!/usr/bin/env bash
# Writes a run's weights as a Hugging Face folder, which transformers loads without a network.
#
#   scripts/export_hf.sh RUN [STEP] [--output FOLDER] [--dtype bfloat16]
#
# RUN   folder of the run, as its report names it, with the checkpoints where the run put them beside it
# STEP  step of the checkpoint; default: the last one
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/usage.sh"
expect_options "--output --dtype" "$@"
expect_first -d RUN "$@"
run=$(realpath "$1")
shift
set -- "$run" "$@"
cd "$here"
scripts/setup.sh
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python -m torchtitan.hf.export "$@"
