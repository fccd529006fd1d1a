"""Checks many command lines in a process, before any is started.

Lines come on standard input; the last line of output holds their errors. Both are JSON.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from timelyfreeze.cli import overlay


def errors_of(
    module: str, lines: Sequence[Sequence[str]], variables: Mapping[str, str], folder: Path
) -> list[str | None]:
    """Return the error of each command line; None for a right line.

    ``module`` has ``check(arguments)``, and raises a ValueError, or exits with a message.
    """
    done = subprocess.run(
        [sys.executable, "-m", "timelyfreeze.cli.checker", module],
        input=json.dumps(lines), capture_output=True, text=True, env=variables, cwd=folder,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[-10:])
        raise ValueError(f"the check by {module} ended with status {done.returncode}:\n{said}")
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _errors(module: str, lines: Sequence[Sequence[str]]) -> Iterator[str | None]:
    check = import_module(module).check
    for arguments in lines:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                check(arguments)
        except (ValueError, OSError) as error:
            yield str(error)
        except SystemExit:
            yield said.getvalue().strip()
        else:
            yield None


if __name__ == "__main__":
    overlay.install()  # also where the project is not installed
    print("\n" + json.dumps([*_errors(sys.argv[1], json.load(sys.stdin))]))
