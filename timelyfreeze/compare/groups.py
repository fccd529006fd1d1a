"""The runs of a comparison with their metrics, and which of them repeat each other.

Repeats share schedule, method, settings and the place where they ran; seeds may differ. Means and
spreads are over repeats, in tables and in plots alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timelyfreeze.compare.metrics import COLUMNS, Metric, Terms, baselines, place, place_name
from timelyfreeze.compare.runs import FINISHED, Run
from timelyfreeze.compare.settings import variants

# In the paper's order, then the rest of torch's; others follow by name.
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV",
)  # fmt: skip
NO_PLACE = "-"
_FEW_SETTINGS = 3


@dataclass(frozen=True)
class Compared:
    """A run, what it is compared with, and its metrics by the key of their column.

    Attributes:
        run: The run.
        baseline: The run without freezing that it is set against, None if there is none.
        metrics: By the key of their column; empty if the run did not finish.
        variant: The settings in which it differs from other runs of its method.
    """

    run: Run
    baseline: Run | None
    metrics: Mapping[str, Metric]
    variant: str = ""


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of a metric over repeats."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Group:
    """Runs that repeat each other.

    Attributes:
        schedule: The pipeline schedule.
        method: The freezing method.
        variant: The settings in which they differ from other runs of the method.
        place: Where they ran, and which model; ``-`` if none of them finished.
        members: The runs, those that finished first.
    """

    schedule: str
    method: str
    variant: str
    place: str
    members: tuple[Compared, ...]

    @property
    def name(self) -> str:
        """Method and settings."""
        return f"{self.method}, {self.variant}" if self.variant else self.method

    @property
    def short_name(self) -> str:
        """Method and settings where there is little room: of many settings the first ones."""
        settings = self.variant.split(", ")
        if len(settings) <= _FEW_SETTINGS:
            return self.name
        return ", ".join(
            [self.method, *settings[:_FEW_SETTINGS], f"{len(settings) - _FEW_SETTINGS} more"]
        )

    @property
    def finished(self) -> list[Compared]:
        """The runs that did all their steps."""
        return [one for one in self.members if one.run.status == FINISHED]

    def spread(self, key: str) -> Spread | None:
        """Return mean and spread of a metric; None if no run knows it as a number."""
        return spread(one.metrics.get(key) for one in self.finished)


def spread(values: Iterable[Metric]) -> Spread | None:
    """Return mean and spread of those ``values`` that are numbers; None if there are none."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return None
    return Spread(statistics.fmean(numbers), min(numbers), max(numbers))


def compare(runs: Sequence[Run], terms: Terms) -> list[Compared]:
    """Return every run with its metrics, in the order of the table; only finished runs have any."""
    told = _variants(runs)
    compared = [
        Compared(
            run,
            baseline,
            {column.key: column.metric(run, baseline, terms) for column in COLUMNS}
            if run.status == FINISHED
            else {},
            variant,
        )
        for run, baseline, variant in zip(runs, baselines(runs), told, strict=True)
    ]
    return sorted(compared, key=_position)


def group(compared: Sequence[Compared]) -> list[Group]:
    """Return the groups of repeats, in the order of the table.

    A run that did not end may not know its place; it goes with the first group of its method.
    """
    groups: dict[tuple[Any, ...], list[Compared]] = {}
    for one in sorted(compared, key=lambda one: one.run.status != FINISHED):
        what = (one.run.schedule, one.run.method)
        key = (*what, one.variant, place(one.run))
        if one.run.status != FINISHED:
            alike = [known for known in groups if known[:2] == what]
            same = [known for known in alike if known[2] == one.variant]
            key = next(iter(same or alike), key)
        groups.setdefault(key, []).append(one)
    members = sorted(groups.values(), key=lambda ones: _position(ones[0])[:5])
    return [
        Group(
            schedule=ones[0].run.schedule,
            method=ones[0].run.method,
            variant=ones[0].variant,
            place=place_name(ones[0].run) if ones[0].run.status == FINISHED else NO_PLACE,
            members=tuple(ones),
        )
        for ones in members
    ]


def schedule_rank(schedule: str) -> tuple[int, str]:
    """Return what sorts schedules: the paper's order, then by name."""
    known = schedule in SCHEDULES
    return SCHEDULES.index(schedule) if known else len(SCHEDULES), schedule


def _variants(runs: Sequence[Run]) -> list[str]:
    """Return of each run the settings that set it apart from its method's others in its place."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, run in enumerate(runs):
        alike.setdefault((run.method, place(run)), []).append(i)
    told = [""] * len(runs)
    for (method, *_), members in alike.items():
        texts = variants(method, [runs[i].settings for i in members])
        for i, text in zip(members, texts, strict=True):
            told[i] = text
    return told


def _position(one: Compared) -> tuple[Any, ...]:
    """Return what sorts runs: by schedule, of each none first."""
    run = one.run
    return (
        schedule_rank(run.schedule),
        run.method != "none",
        run.method,
        one.variant,
        -1 if run.seed is None else run.seed,
        str(run.folder),
    )
