#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt, on first use or when the requirements have changed.
#
# Usage: scripts/setup.sh [EXTRA]      EXTRA is an optional group of pyproject.toml, for example dev
# PYTHON=/path/to/python chooses the interpreter; pip's own settings (index, proxies, caches) are respected.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
[ $# -le 1 ] || refuse "$# arguments; it takes one at most"
extra=${1:-}
case $extra in
  '' | dev | eval | vision | lora) ;;
  # pip would install everything else, and say in a warning that there is no such group.
  *) refuse "EXTRA is '$extra'; pyproject.toml has dev, eval, vision and lora" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

project=.[titan${extra:+,$extra}]
stamp=.venv/.installed${extra:+-$extra}
stamps=("$stamp")
# An environment with an extra in it serves those who want none.
[ -n "$extra" ] || stamps+=(.venv/.installed-*)
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
for done in "${stamps[@]}"; do
  if [ -f "$done" ] && [ "$(cat "$done")" = "$wanted" ]; then
    exit 0
  fi
done

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
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$project"
echo "$wanted" > "$stamp"
