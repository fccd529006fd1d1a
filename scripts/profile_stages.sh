#!/usr/bin/env bash
# Times each pipeline stage of a configuration alone on this device: one GPU, or none.
#
#   scripts/profile_stages.sh CONFIG.toml [--output FOLDER] [--ratios 0 0.5 1] [--repeats 10] [-- --section.key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/usage.sh"
expect_options "--output --ratios --warmup --repeats" "$@"
expect_config "$here" "$@"
shift
scripts/setup.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec .venv/bin/python -m torchtitan.freezing.profile.command "$config" "$@"
