"""Policies that other distributions bring."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
POLICY = """
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from timelyfreeze import Check, Decision, register_policy


@register_policy("head_only")
@dataclass(frozen=True)
class HeadOnly:
    check_interval = 1
    measurement = None

    def errors(self) -> Iterator[str]:
        return iter(())

    def start(self, check: Check) -> Decision:
        return Decision(np.ones(len(check.layout.names), dtype=np.bool_))

    def decide(self, before: Decision, check: Check) -> Decision:
        return before
"""
ASK = """
from timelyfreeze.policies import parse_method, registered_policies
print(sorted(set(registered_policies()) & {"head_only"}), parse_method("timelyfreeze+head_only"))
"""


def ask(folder: Path, source: str, value: str) -> subprocess.CompletedProcess[str]:
    """What a process says that finds a distribution with one module and one entry point."""
    (folder / "their_policies.py").write_text(source)
    info = folder / "their_policies-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[timelyfreeze.policies]\nhead = {value}\n")
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]"
    return subprocess.run(
        [sys.executable, "-c", paths + ASK], capture_output=True, text=True, timeout=120
    )


def test_an_entry_point_makes_a_policy_known(tmp_path: Path) -> None:
    done = ask(tmp_path, POLICY, "their_policies:HeadOnly")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['head_only'] Method(plans=True, policy='head_only')\n"


@pytest.mark.parametrize(
    ("source", "value", "why"),
    [
        ("import not_there", "their_policies:HeadOnly", "cannot be loaded: ModuleNotFoundError"),
        (POLICY, "their_policies:Other", "cannot be loaded: AttributeError"),
        ("raise SystemError('x')", "their_policies", "cannot be loaded: SystemError: x"),
        ("HeadOnly = 3", "their_policies:HeadOnly", "registers no policy"),
        (POLICY.replace("head_only", "apf"), "their_policies", "'apf' is registered twice"),
    ],
)
def test_a_broken_one_is_named(source: str, value: str, why: str, tmp_path: Path) -> None:
    done = ask(tmp_path, source, value)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert f"the entry point 'head' ({value}) of 'timelyfreeze.policies'" in error
    assert "in their-policies 1.5" in error
    assert why in error
