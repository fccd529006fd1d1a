"""Single runs that stand for their group: one batch of one, and how often it froze its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.runs import Run
from timelyfreeze.compare.runs.peers import freezes
from timelyfreeze.compare.runs.variants import work_differs
from timelyfreeze.plots.run_timelines import measured_batch, predicted_batch
from timelyfreeze.records import COUNTS, FROZEN, UNFROZEN, FrozenCount, Timeline

T = TypeVar("T")


@dataclass(frozen=True)
class Example(Generic[T]):
    """What one run has, shown for the whole of a group.

    Attributes:
        group: For which it is shown.
        run: Whose it is: one of the group's, or for ``none`` one that freezes.
        value: What it is.
    """

    group: Group
    run: Run
    value: T


@dataclass(frozen=True)
class Examples(Generic[T]):
    """The examples that there are, and of what could not be read the reason."""

    known: tuple[Example[T], ...]
    unread: tuple[str, ...]


def batches(groups: Sequence[Group]) -> Examples[Timeline]:
    """Return a batch of each group: a measured one if any of its runs has one, else a predicted.

    A run of ``none`` measures no batch. Its batch is one that a run which freezes measured before
    it did, with the same seed where there is such a run, and of these the one whose batches
    without freezing are nearest to those of none. Peers have no batch of their own.

    Args:
        groups: Of one schedule and place, with as much work in a step.
    """
    freezing = [run for group in groups if freezes(group.method) for run in group.runs]

    def runs_of(group: Group) -> Sequence[Run]:
        if group.method == "none":
            return sorted(freezing, key=lambda run: _distance(run, group.runs[0]))
        return group.runs if freezes(group.method) else ()

    def readers(group: Group) -> Iterator[Callable[[Path], Timeline | None]]:
        phases = FROZEN if freezes(group.method) else UNFROZEN
        yield lambda folder: measured_batch(folder, phases)
        yield lambda folder: predicted_batch(folder, phases)

    return _first([
        (group, run, read) for group in groups for read in readers(group) for run in runs_of(group)
    ])  # fmt: skip


def _distance(run: Run, none: Run) -> tuple[bool, float]:
    """Return what tells how well a run's unfrozen batch stands for those of none."""
    own_ms, nones_ms = run.summary.batch_ms_unfrozen, none.summary.batch_ms
    apart = math.inf if own_ms is None or nones_ms is None else abs(own_ms - nones_ms)
    return run.seed != none.seed, apart


def frozen_counts(groups: Sequence[Group]) -> Examples[Sequence[FrozenCount]]:
    """Return for each group what became of the tensors of a last rank, once freezing had begun."""
    return _first([(group, run, _last_rank) for group in groups for run in group.runs])


def _last_rank(run_folder: Path) -> Sequence[FrozenCount] | None:
    if not (run_folder / COUNTS.name).exists():
        return None
    counts = [count for count in COUNTS.read(run_folder) if count.backwards]
    last = max((count.rank for count in counts), default=None)
    return [count for count in counts if count.rank == last] or None


def _first(
    candidates: Sequence[tuple[Group, Run, Callable[[Path], T | None]]],
) -> Examples[T]:
    """Return the first example of each group; after it none of the group is read any more."""
    known: dict[Group, Example[T]] = {}
    unread: dict[str, None] = {}
    for group, run, read in candidates:
        if group in known:
            continue
        try:
            value = read(run.folder)
        except (OSError, ValueError) as error:
            unread[f"what cannot be read of {run.label}: {error}"] = None
            continue
        if value is not None:
            known[group] = Example(group, run, value)
    return Examples(tuple(known.values()), tuple(unread))


def same_work(groups: Sequence[Group]) -> list[list[Group]]:
    """Return ``groups`` in parts whose steps have as much to do, as far as that is known."""
    parts: list[list[Group]] = []
    for group in groups:
        settings = group.runs[0].settings
        for part in parts:
            if not work_differs(part[0].runs[0].settings, settings):
                part.append(group)
                break
        else:
            parts.append([group])
    return parts
