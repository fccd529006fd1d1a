#!/usr/bin/env bash
# Says before launch what each rank's memory will hold, and whether it fits. Needs no GPU.
#
#   scripts/estimate_memory.sh CONFIG.toml [--schedules GPipe 1F1B ...] [--device-gib 48 140] [-- --section.key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/usage.sh"
expect_options "--schedules --device-gib" "$@"
expect_config "$here" "$@"
shift
scripts/setup.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python torchtitan/freezing/memory/command.py "$config" "$@"
