"""Who may import whom, read from CONTRIBUTING's table and from the source, without running it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "timelyfreeze").rglob("*.py"), *(ROOT / "torchtitan").rglob("*.py")])
# What a room has to name in the table's last column before it may import it.
NEEDS = {"torch", "torchtitan", "matplotlib", "pandas", "lm_eval"}
PIPELINING = "torch.distributed.pipelining"
ADAPTER = "timelyfreeze/runtime/torch_pipelining.py"
ENTRIES = 18  # of a folder


@dataclass(frozen=True)
class Room:
    """A line of the table: a folder, and what it needs beyond Python and numpy."""

    place: int
    needs: frozenset[str]


def read_table() -> dict[str, Room]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^\| `((?:timelyfreeze|torchtitan)/[^`]*)` \|.*\| ([^|]*) \|$", text, re.M)
    return {
        folder.rstrip("/"): Room(place, frozenset(re.findall(r"\w+", needs)))
        for place, (folder, needs) in enumerate(lines)
    }


TABLE = read_table()


def room_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Full name of everything that is imported, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def at_once(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What is imported when the module is: not inside functions, nor for types alone."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)


def belongs_to(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def home(name: str) -> str | None:
    """The folder that an imported name comes from, if it is ours."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:n])
        if path.with_suffix(".py").is_file():
            return path.parent.relative_to(ROOT).as_posix()
        if (path / "__init__.py").is_file():
            return path.relative_to(ROOT).as_posix()
    return None


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def forbidden(path: Path, tree: ast.Module) -> list[str]:
    """What of a module's imports the table does not allow."""
    mine, found = TABLE[room_of(path)], []
    for name, line in imports(tree):
        theirs = home(name)
        if theirs is not None and theirs in TABLE and TABLE[theirs].place > mine.place:
            found.append(f"line {line}: {theirs} stands below {room_of(path)}")
    for name, line in at_once(tree):
        theirs = home(name)
        package = name.split(".")[0]
        if theirs is None:
            missing = {package} & NEEDS - mine.needs
        else:
            missing = TABLE[theirs].needs - mine.needs if theirs in TABLE else set()
        found += [f"line {line}: {name} brings {need}" for need in sorted(missing)]
    return found


def test_a_room_imports_those_above_it_and_what_it_says_it_needs() -> None:
    found = {str(path.relative_to(ROOT)): forbidden(path, tree_of(path)) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    ("source", "n"),
    [
        ("import torch", 1),
        ("def f():\n    import torch", 0),
        ("from timelyfreeze.runtime import FreezingStage", 2),
        ("def f():\n    from timelyfreeze.runtime import FreezingStage", 1),
        ("from timelyfreeze.files import shown", 0),
        ("import numpy", 0),
    ],
)
def test_the_search_finds_what_is_not_allowed(source: str, n: int) -> None:
    assert len(forbidden(ROOT / "timelyfreeze/schedule/order.py", ast.parse(source))) == n


def test_the_table_has_every_folder_and_no_other() -> None:
    assert set(TABLE) == {room_of(path) for path in SOURCES}
    assert not any(
        "torchtitan" in TABLE[room].needs for room in TABLE if room[:1] + room[1:4] == "time"
    )


def test_a_folder_is_small_and_says_what_lives_in_it() -> None:
    for room in TABLE:
        entries = [p for p in (ROOT / room).iterdir() if not p.name.startswith(("__", "py.typed"))]
        assert len(entries) <= ENTRIES, room
        assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())), room


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
    names = [name for name, _ in imports(tree) if belongs_to(name, PIPELINING)]
    found += [name for name in names if any(part.startswith("_") for part in name.split("."))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base = ast.unparse(node.value)
            if base in aliases and not node.attr.startswith("__"):
                found.append(f"{base}.{node.attr}")
    return found


def test_private_names_of_torchs_pipelining_stand_in_one_file() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if private_pipelining_names(tree_of(path))
    }
    assert found == {ADAPTER}


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
