"""What importing the package brings, and what it must not."""

import subprocess
import sys
from pathlib import Path

import timelyfreeze


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, timelyfreeze\n"
        "heavy = {'torch', 'torchtitan', 'matplotlib', 'highspy', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


def test_every_export_is_there() -> None:
    names = set(timelyfreeze.__all__)
    assert all(getattr(timelyfreeze, name) is not None for name in names)
    assert {"TimelyFreeze", "register_policy", "FreezePolicy", "Check", "Decision"} <= names


def test_type_checkers_see_every_export() -> None:
    source = Path(str(timelyfreeze.__file__)).read_text()
    seen = {line.split(" as ")[1] for line in source.splitlines() if line[:9] == "    from "}
    assert seen == set(timelyfreeze.__all__)
