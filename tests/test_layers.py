"""Who may import whom, read from the source without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "timelyfreeze").rglob("*.py"))
FORK = sorted((ROOT / "torchtitan").rglob("*.py"))
# From schedule to plan, and from figures to a decision, everything is plain data: no torch, and
# nothing that imports it.
PURE = {
    "__init__",
    "actions",
    "background",
    "parent_death",
    "bounds",
    "budget",
    "cascade",
    "clocks",
    "convergence",
    "dag",
    "emulation",
    "emulation_state",
    "figures",
    "files",
    "interior",
    "layout",
    "lp",
    "lp_cascade",
    "lp_program",
    "lp_simplex",
    "messages",
    "methods",
    "order",
    "phases",
    "plain_json",
    "plan",
    "policies",
    "policy",
    "prefix",
    "processors",
    "runs",
    "schedules",
    "selection",
    "settings",
    "shrinkage",
    "timeline",
    "timeline_file",
    "trace",
    "tally",
    "whatif.__init__",
    "whatif.bounds_file",
    "whatif.case",
    "whatif.grid",
    "whatif.links",
    "whatif.layer_model",
    "whatif.notes",
    "whatif.recall",
    "whatif.report",
    "whatif.rival",
    "whatif.splits",
    "whatif.times",
}


def module_name(path: Path) -> str:
    """Name of a module of the library, without the library's own."""
    return ".".join(path.relative_to(ROOT / "timelyfreeze").with_suffix("").parts)


def is_pure(name: str) -> bool:
    """Whether a module, or something in one, is listed, or the package that it is in."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in PURE for n in range(1, len(parts) + 1))


PURE_FILES = [path for path in LIBRARY if is_pure(module_name(path))]
PIPELINING = "torch.distributed.pipelining"
ADAPTER = ROOT / "timelyfreeze" / "torch_pipelining.py"


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text())))


def belongs_to(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("path", LIBRARY, ids=module_name)
def test_the_library_knows_nothing_of_torchtitan(path: Path) -> None:
    assert [name for name in imports_of(path) if belongs_to(name, "torchtitan")] == []


@pytest.mark.parametrize("path", PURE_FILES, ids=module_name)
def test_planning_and_policies_need_no_torch(path: Path) -> None:
    names = imports_of(path)
    assert [name for name in names if belongs_to(name, "torch")] == []
    if not belongs_to(module_name(path), "figures"):
        assert [name for name in names if belongs_to(name, "matplotlib")] == []
    siblings = [name.partition(".")[2] for name in names if belongs_to(name, "timelyfreeze")]
    assert [name for name in siblings if not is_pure(name)] == [], "torch comes in by these"


def private_pipelining_names(tree: ast.AST) -> list[str]:
    """Names with a leading underscore that are taken from torch's pipelining package."""
    found, aliases = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if belongs_to(alias.name, PIPELINING):
                    aliases.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if belongs_to(name, PIPELINING):
                    aliases.add(alias.asname or alias.name)
    names = [name for name in imports(tree) if belongs_to(name, PIPELINING)]
    found += [name for name in names if any(part.startswith("_") for part in name.split("."))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base = ast.unparse(node.value)
            if base in aliases and not node.attr.startswith("__"):
                found.append(f"{base}.{node.attr}")
    return found


def test_private_names_of_torchs_pipelining_stand_in_one_file() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in [*LIBRARY, *FORK]
        if (names := private_pipelining_names(ast.parse(path.read_text())))
    }
    assert set(found) == {ADAPTER.relative_to(ROOT).as_posix()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch.distributed.pipelining._backward import x", 1),
        ("from torch.distributed.pipelining import _utils", 1),
        ("import torch.distributed.pipelining.schedules as s\ns._Action", 1),
        ("def f():\n    from torch.distributed.pipelining import schedules\n    schedules._A", 1),
        ("from torch.distributed.pipelining import PipelineStage\nself._private", 0),
    ],
)
def test_the_search_for_private_names_finds_them(source: str, expected: int) -> None:
    assert len(private_pipelining_names(ast.parse(source))) == expected


def test_every_module_of_the_library_was_seen() -> None:
    listed = PURE - {"policies", "interior", "figures", "runs"}
    assert {module_name(path) for path in PURE_FILES} >= listed | {
        "policies.apf",
        "policies.lisa",
        "interior.strip",
        "figures.style",
    }
    assert {module_name(path) for path in LIBRARY} >= {"stage", "controller", "torch_pipelining"}
    assert not any(is_pure(name) for name in ("stage", "controller", "torch_pipelining"))
    assert any(path.name == "upstream_fixes.py" for path in FORK)
