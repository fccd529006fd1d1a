"""The runs of a comparison with their metrics, grouped by repeats.

Repeats share schedule, method, settings and their place; seeds may differ. Means and spreads are
over repeats, in tables and in plots alike.

A run's baseline is the run of method ``none`` with the same schedule, seed, place and work per
step. Of several, the start closest in time counts, because a machine's speed varies over a day.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from timelyfreeze.compare.metrics import Criteria, row_of
from timelyfreeze.compare.runs.run import NO_PLACE, Run
from timelyfreeze.compare.runs.variants import concerning, split_peer, variants, work_differs

# In the paper's order, then the rest of torch's; others follow by name.
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV",
)  # fmt: skip
# Metrics of runs that differ in one of these are neither averaged nor set against each other.
PLACE = ("device", "n_devices", "model", "emulated_ranks")
_FEW_SETTINGS = 3


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of a metric over repeats."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Group:
    """Repeats of a run, unfinished runs among them."""

    schedule: str
    method: str
    variant: str
    place: str  # ``NO_PLACE`` if none of them finished
    members: Sequence[Run]

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
        more = f"{len(settings) - _FEW_SETTINGS} more"
        return ", ".join([self.method, *settings[:_FEW_SETTINGS], more])

    @property
    def runs(self) -> list[Run]:
        """The finished runs."""
        return [run for run in self.members if run.is_finished]

    @property
    def unit(self) -> str:
        """The unit of the runs' throughput, the same within a place."""
        return self.runs[0].summary.unit

    def spread(self, key: str) -> Spread | None:
        """Return mean and spread of a metric; None without any number."""
        values = [run.metrics[key] for run in self.runs]
        numbers = [value for value in values if isinstance(value, int | float)]
        if not numbers:
            return None
        return Spread(statistics.fmean(numbers), min(numbers), max(numbers))


def compare(runs: Sequence[Run], criteria: Criteria) -> list[Run]:
    """Return the runs with all metrics of a comparison, by schedule, ``none`` first."""
    told, compared = _variants(runs), []
    for run in runs:
        own = replace(run, apart=told[run.folder])
        if run.is_finished:
            none = _baseline(run, runs)
            own = replace(own, baseline=none, metrics=row_of(run, none, criteria))
        compared.append(own)
    return sorted(compared, key=_position)


# Schedule, method, variant and place: what repeats have in common.
_Home = tuple[str, str, str, str]


def group(runs: Sequence[Run]) -> list[Group]:
    """Return the groups of repeats, in the order of the table.

    An unfinished run joins the first group of its method and place with its settings, or any
    settings where unknown. Without a known place among several, or without such a group, the run
    has no group.
    """
    own = [(run.schedule, run.method, run.apart, run.place) for run in runs]
    settled = [home for run, home in zip(runs, own, strict=True) if run.is_finished]
    groups: dict[_Home, list[Run]] = {}
    for run, home in zip(runs, own, strict=True):
        if not run.is_finished:
            home = _home(home, settled)
            settled.append(home)
        groups.setdefault(home, []).append(run)
    return [Group(*home, members) for home, members in groups.items()]


def _home(own: _Home, settled: Sequence[_Home]) -> _Home:
    """Return the group of an unfinished run, if known."""
    alike = [home for home in settled if home[:2] == own[:2] and own[3] in (home[3], NO_PLACE)]
    same = [home for home in alike if home[2] == own[2]]
    fitting = same if own[2] or same else alike
    is_clear = fitting and len({home[3] for home in fitting} - {NO_PLACE}) <= 1
    return fitting[0] if is_clear else (*own[:3], NO_PLACE)


def schedule_rank(schedule: str) -> tuple[int, str]:
    """Return a sorting key of schedules: the paper's order, then by name."""
    known = schedule in SCHEDULES
    return SCHEDULES.index(schedule) if known else len(SCHEDULES), schedule


def _baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    if run.method == "none":
        return run
    where = run.schedule, run.seed, run.place
    nones = [other for other in runs if other.method == "none" and other.is_finished]
    beside = [other for other in nones if (other.schedule, other.seed, other.place) == where]
    candidates = [other for other in beside if _is_same_work(other, run)]

    def apart(other: Run) -> timedelta:
        began = [datetime.fromisoformat(one.summary.started_at) for one in (run, other)]
        return abs(began[0] - began[1])

    return min(candidates, key=apart, default=None)


def _is_same_work(none: Run, run: Run) -> bool:
    """Return whether a run of none did the work of another run, as far as known.

    Varied settings, such as the steps or the learning rate, count too.
    """
    asked = concerning("none", run.variant)
    if split_peer(run.method):
        # It has less to do in a step than none, and is held against it for that.
        return asked == none.variant
    nones, own = {**none.settings, **none.variant}, {**run.settings, **asked}
    is_alike = all(
        key not in nones or key not in own or nones[key] == own[key]
        for key in {*asked, *none.variant}
    )
    return is_alike and not work_differs(none.settings, run.settings)


def _variants(runs: Sequence[Run]) -> dict[Path, str]:
    """Return by folder the settings unlike those of the method's other runs in its place.

    An unfinished run without a known place is compared with the method's runs anywhere.
    """
    told: dict[Path, str] = {}
    for method in dict.fromkeys(run.method for run in runs):
        members = [run for run in runs if run.method == method]
        homes = {run.place for run in members if run.told is not None} or {NO_PLACE}
        for home in sorted(homes):
            alike = [run for run in members if run.place in (home, NO_PLACE)]
            texts = variants(method, [(run.settings, run.variant) for run in alike])
            told |= {run.folder: text for run, text in zip(alike, texts, strict=True)}
    return told


def _position(run: Run) -> tuple[Any, ...]:
    # Peers stand below the method whose time they are given.
    peer, method = split_peer(run.method) or ("", run.method)
    # Settings with numbers in them go by their size, 8 before 16.
    parts = re.split(r"(\d+(?:\.\d+)?)", run.apart)
    settings = [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]
    seed = -1 if run.seed is None else run.seed
    by_method = method != "none", method, peer
    return schedule_rank(run.schedule), *by_method, settings, seed, str(run.folder)
