"""A run in parts: one that was killed and went on from a checkpoint has a folder for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from timelyfreeze.files import Table
from timelyfreeze.records.tables import MOVES, STEPS

RECORD = "comparison_run.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The files of a process of a run."""

    folder: Path
    last_step: float = math.inf  # rows of later steps are void: the next part did them again
    before: float = 0.0  # seconds of all steps in the parts before


def parts_of(folder: Path) -> list[Part]:
    """Return the parts of the run that ended in ``folder``, the oldest first.

    Several only where a comparison made the run: other folders may hold several runs.
    """
    place = next((one for one in folder.parents if (one / RECORD).is_file()), None)
    parts = [] if place is None else _parts_below(place)
    return parts if len(parts) > 1 and parts[-1].folder == folder else [Part(folder)]


def _parts_below(place: Path) -> list[Part]:
    # Folders are named by the time of their start.
    read = [(path.parent, STEPS.read(path.parent)) for path in sorted(place.rglob(STEPS.name))]
    begun = [(folder, rows) for folder, rows in read if rows]
    parts, before = [], 0.0
    for number, (folder, rows) in enumerate(begun, 1):
        last = min((later[0].step - 1 for _, later in begun[number:]), default=math.inf)
        parts.append(Part(folder, last, before))
        before += max((row.seconds for row in rows if row.step <= last), default=0.0)
    return parts


def joined(table: Table[T], parts: Sequence[Part]) -> list[T]:
    """Return the rows of all parts, with the seconds since the run began."""
    rows: list[T] = []
    for part in parts:
        own: list[Any] = table.read(part.folder) if (part.folder / table.name).exists() else []
        rows += [_later(row, part.before, table) for row in own if row.step <= part.last_step]
    return rows


def _later(row: Any, before: float, table: Table[Any]) -> Any:
    """Return a row with the seconds of former parts; a move's are its own."""
    is_clock = "seconds" in table.header and table is not MOVES
    return replace(row, seconds=row.seconds + before) if is_clock and before else row


def can_go_on(place: Path) -> bool:
    """Return whether a run has a checkpoint, and the times of all steps up to its last one."""
    saved = [path.parent.name for path in place.glob("*/step-*/.metadata")]
    steps = [int(name.removeprefix("step-")) for name in saved if name[5:].isdecimal()]
    if not steps:
        return False
    try:
        known = {row.step for row in joined(STEPS, _parts_below(place))}
    except ValueError:  # of a broken file nothing is known
        return False
    return known.issuperset(range(1, max(steps) + 1))
