# For scripts of this folder, which source it: which Python runs the project.
# shellcheck shell=bash

# choose_python [EXTRA]: sets python. It is $TIMELYFREEZE_PYTHON, or that of an activated environment in which the
# project is installed; otherwise that of .venv, which is made, or brought up to date, first.
choose_python() {
  python=${TIMELYFREEZE_PYTHON:-}
  if [ -n "$python" ]; then
    if ! "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
      echo "error: TIMELYFREEZE_PYTHON is '$python'; it must be a Python that has torch" >&2
      exit 2
    fi
    return
  fi
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [ -n "$active" ] && [ "$active" != "$PWD/.venv" ] &&
    "$active/bin/python" -c 'import importlib.metadata as m; m.version("timelyfreeze"), m.version("torchtitan")' 2>/dev/null; then
    python=$active/bin/python
    return
  fi
  scripts/setup.sh "$@"
  python=.venv/bin/python
}
