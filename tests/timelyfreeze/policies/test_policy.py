import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

import timelyfreeze.policies.policy as policy_module
from timelyfreeze.policies.policy import Measurement, register_policy, registered_policies

ROOT = Path(__file__).resolve().parents[3]
EXPECTED = {
    "apf", "autofreeze", "egeria", "fixed", "linear", "lisa", "pipetransformer", "smartpipe",
}  # fmt: skip
FILES = sorted(
    path for path in (ROOT / "timelyfreeze" / "policies").glob("*.py") if path.stem in EXPECTED
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """A registry of its own, so that a test leaves nothing behind."""
    ours = registered_policies()
    monkeypatch.setattr(policy_module, "_POLICIES", ours)
    return ours


@dataclass(frozen=True)
class Nothing:
    """A policy's shell."""

    check_interval: int = 1


def test_a_registered_class_is_found_by_name(registry: dict[str, type]) -> None:
    assert register_policy("nothing")(Nothing) is Nothing
    assert registered_policies()["nothing"] is Nothing


def test_a_taken_name_is_refused_with_both_classes(registry: dict[str, type]) -> None:
    register_policy("nothing")(Nothing)
    with pytest.raises(ValueError, match="'nothing' is registered twice: Nothing and Nothing"):
        register_policy("nothing")(Nothing)
    with pytest.raises(ValueError, match="'apf' is registered twice: Apf and Nothing"):
        register_policy("apf")(Nothing)


@pytest.mark.parametrize("name", ["my-policy", "2fast", "", "a.b", "a b"])
def test_a_name_that_cannot_be_a_section_is_refused(registry: dict[str, type], name: str) -> None:
    with pytest.raises(ValueError, match="use letters, digits and underscores"):
        register_policy(name)(Nothing)
    assert name not in registered_policies()


@pytest.mark.parametrize("name", ["none", "lora", "timelyfreeze"])
def test_a_name_of_a_method_that_is_no_policy_is_refused(
    registry: dict[str, type], name: str
) -> None:
    with pytest.raises(ValueError, match=f"no policy can be named '{name}'"):
        register_policy(name)(Nothing)


def test_a_class_without_fields_for_settings_is_refused(registry: dict[str, type]) -> None:
    class Plain:
        check_interval = 1

    with pytest.raises(ValueError, match="Plain is not a dataclass"):
        register_policy("plain")(Plain)
    assert "plain" not in registered_policies()


def test_what_is_handed_out_is_a_copy() -> None:
    registered_policies().clear()
    assert set(registered_policies()) >= EXPECTED


def test_every_file_of_the_package_registers_itself_without_torch() -> None:
    # In a process of its own: here other tests have imported them, and torch, already.
    code = (
        "import sys; from timelyfreeze.policies.policy import registered_policies; "
        "print(*sorted(registered_policies())); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [path.stem for path in FILES]
    assert set(done.stdout.split()) >= EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_policy_has_what_a_run_asks_of_it(name: str) -> None:
    policy = registered_policies()[name]()
    assert list(policy.errors()) == [], "defaults must be sound"
    assert policy.check_interval >= 1
    assert policy.measurement is None or isinstance(policy.measurement, Measurement)
    with pytest.raises(AttributeError):
        policy.check_interval = 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_has_a_help_text(path: Path) -> None:
    # The configuration shows the string under a field; a field without one has no help.
    settings = registered_policies()[path.stem]
    assert is_dataclass(settings)
    tree = ast.parse(path.read_text())
    body = next(
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == settings.__name__
    )
    documented = {
        ast.unparse(field.target)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
    assert documented == {field.name for field in fields(settings)}
