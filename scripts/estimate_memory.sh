#!/usr/bin/env bash
# Says before launch what each rank's memory will hold, and whether it fits. Needs no GPU.
#
#   scripts/estimate_memory.sh CONFIG.toml [--schedules GPipe 1F1B ...] [--device-gib 48 140] [-- --section.key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/scripts/usage.sh"
expect_options "--schedules --device-gib" "$@"
config=${1:-}
# As run_train.sh: a file from where it is called, else from the repository.
if [ -f "$config" ]; then
  config=$(realpath "$config")
fi
cd "$here"
expect_first -f CONFIG.toml ${config:+"$config"}
shift
scripts/setup.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python scripts/estimate_memory.py "$config" "$@"
