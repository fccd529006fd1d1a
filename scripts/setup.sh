#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt, on first use or when the requirements have changed.
#
# Usage: scripts/setup.sh [EXTRA ...]      EXTRA is an optional group of pyproject.toml, for example dev
# PYTHON=/path/to/python chooses the interpreter; pip's own settings (index, proxies, caches) are respected.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
for extra in "$@"; do
  case $extra in
    dev | eval | vision | lora) ;;
    # pip would install everything else, and say in a warning that there is no such group.
    *) refuse "EXTRA is '$extra'; pyproject.toml has dev, eval, vision and lora" ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

groups=titan stamps=(.venv/.installed)
if [ $# -gt 0 ]; then
  groups=$(IFS=,; echo "titan,$*")
  stamps=("${@/#/.venv/.installed-}")
fi
wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
# Several hosts, or several runs, may start at once in one shared folder: one installs, the others wait.
exec 9> .venv.lock
if ! flock --nonblock 9; then
  echo "Waiting for another process that makes .venv"
  flock --timeout 1800 9 || {
    echo "error: .venv.lock is held, or this file system knows no locks; run scripts/setup.sh once on one host first" >&2
    exit 1
  }
fi
is_installed() {
  local stamp
  for stamp in "$@"; do
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] || return 1
  done
}
if is_installed "${stamps[@]}"; then
  exit 0
fi
# An environment with an extra in it serves those who want none.
if [ $# -eq 0 ]; then
  for stamp in .venv/.installed-*; do
    ! is_installed "$stamp" || exit 0
  done
fi

if [ ! -x .venv/bin/python ]; then
  python=${PYTHON:-}
  for candidate in python3.12 python3.11 python3 python; do
    [ -z "$python" ] || break
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      python=$candidate
    fi
  done
  if [ -z "$python" ]; then
    echo "error: no Python 3.11 or 3.12 found; install one, or name it: PYTHON=/path/to/python $0" >&2
    exit 1
  fi
  echo "Making .venv with $("$python" --version)"
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    echo "error: $python cannot make virtual environments; on Debian and Ubuntu install python3-venv" >&2
    exit 1
  fi
fi
echo "Installing the project and what it needs; this happens once and takes a minute or more"
# Python compiles a module when it is first imported: most never are.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$groups]"
for stamp in "${stamps[@]}"; do
  echo "$wanted" > "$stamp"
done
