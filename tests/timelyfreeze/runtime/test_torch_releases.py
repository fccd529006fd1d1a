"""An untested torch is refused by name, before anything of it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from timelyfreeze.runtime.torch_releases import END, FIRST, UNTESTED, require_tested

ROOT = Path(__file__).parents[3]
TESTED = ["2.13.0+cpu", "2.14.1+cu130", "2.15.0", "2.15.1", "2.15.0a0+git1234"]
UNKNOWN = ["2.12.1", "1.15.0", "2.16.0", "2.16.0.dev20261101+cu130", "3.11.0"]


@pytest.mark.parametrize("version", TESTED)
def test_tested_releases_are_taken(version: str) -> None:
    require_tested(version, None)


@pytest.mark.parametrize("version", UNKNOWN)
def test_others_are_refused_by_name_unless_allowed_by_name(version: str) -> None:
    with pytest.raises(ImportError) as error:
        require_tested(version, TESTED[0])
    said = str(error.value)
    assert said.startswith(f"torch {version} was not tested")
    assert "install torch 2.13 to 2.15" in said
    assert said.endswith(f"{UNTESTED}={version}")
    require_tested(version, version)


def test_the_import_fails_before_any_other_of_the_runtime() -> None:
    """Also where only a module of the runtime, or the library, is asked for."""
    look = (
        "import sys, torch; torch.__version__ = '9.9.9'\n"
        "for module in ('timelyfreeze.runtime.stage', 'timelyfreeze.api'):\n"
        "    try: __import__(module)\n"
        "    except ImportError as error: print(str(error)[:30])\n"
        "print('timelyfreeze.runtime.torch_pipelining' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), UNTESTED: torch.__version__}
    done = subprocess.run(
        [sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True
    )
    refused = "torch 9.9.9 was not tested wit"
    assert done.stdout.splitlines() == [refused, refused, "False"]


def test_this_torch_is_one_of_them() -> None:
    assert FIRST <= tuple(map(int, torch.__version__.split(".")[:2])) < END
