"""The runs of a comparison with their metrics, and which of them repeat each other.

Repeats share schedule, method, settings and the place where they ran; seeds may differ. Means and
spreads are over repeats, in tables and in plots alike.

A run's baseline is the run of method ``none`` with the same schedule and seed, in the same place,
and with as much work in a step. Of several, the one that was started closest in time counts,
because a machine is not equally fast all day.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from timelyfreeze.compare.metrics import COLUMNS, Terms
from timelyfreeze.compare.runs import FINISHED, Run
from timelyfreeze.compare.runs.peers import split_peer
from timelyfreeze.compare.runs.run import concerning, variants, work_differs

# In the paper's order, then the rest of torch's; others follow by name.
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV",
)  # fmt: skip
# Metrics of runs that differ in one of these are neither averaged nor set against each other.
PLACE = ("device", "n_devices", "model", "emulated_ranks")
NO_PLACE = "-"
_REPEAT = ["schedule", "method", "variant", "place"]
_NAMES = ["schedule", "method", "seed", "status", "folder", "variant", "place", "run"]
_FEW_SETTINGS = 3


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of a metric over repeats."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that repeat each other.

    Attributes:
        schedule: The pipeline schedule.
        method: The freezing method.
        variant: The settings in which they differ from other runs of the method.
        place: Where they ran, and which model; ``-`` if none of them finished.
        members: The runs, a line for each as ``compare`` gives them.
    """

    schedule: str
    method: str
    variant: str
    place: str
    members: pd.DataFrame

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
    def finished(self) -> pd.DataFrame:
        """The lines of runs that did all their steps."""
        return self.members[self.members["status"] == FINISHED]

    @property
    def runs(self) -> list[Run]:
        """The runs that did all their steps."""
        return list(self.finished["run"])

    @property
    def unit(self) -> str:
        """What the throughput of the runs counts, which is one thing in a place."""
        return self.runs[0].summary.unit

    def spread(self, key: str) -> Spread | None:
        """Return mean and spread of a metric; None if no run knows it as a number."""
        numbers = [value for value in self.finished[key] if isinstance(value, int | float)]
        if not numbers:
            return None
        return Spread(statistics.fmean(numbers), min(numbers), max(numbers))


def compare(runs: Sequence[Run], terms: Terms) -> pd.DataFrame:
    """Return a line for each run, in the order of the table: by schedule, of each none first.

    Columns are schedule, method, seed, status, folder, variant, place, run, baseline, and the keys
    of ``COLUMNS``. Only runs that finished have a baseline and metrics; None for what is not known.
    """
    told = _variants(runs)
    lines: list[dict[str, Any]] = []
    for run in runs:
        names = (run.schedule, run.method, run.seed, run.status, run.folder, told[run.folder])
        line: dict[str, Any] = dict(zip(_NAMES, (*names, place(run), run), strict=True))
        if run.status == FINISHED:
            baseline = _baseline(run, runs)
            metrics = {column.key: column.of(run, baseline, terms) for column in COLUMNS}
            line |= {"baseline": baseline, **metrics}
        lines.append(line)
    columns = [*_NAMES, "baseline", *(column.key for column in COLUMNS)]
    lines = [{key: line.get(key) for key in columns} for line in sorted(lines, key=_position)]
    return pd.DataFrame(lines, columns=columns, dtype=object)


def group(compared: pd.DataFrame) -> list[Group]:
    """Return the groups of repeats, in the order of the table.

    A run that did not end goes with the first group of its method and place that has its settings,
    or any where they are not known. If it does not know its place, and such groups are in several,
    or if there is no such group, it is in none of them.
    """
    homes = compared[_REPEAT].copy()
    is_finished = compared["status"] == FINISHED
    settled = homes[is_finished]
    for i, (schedule, method, variant, known) in homes[~is_finished].iterrows():
        alike = settled[(settled["schedule"] == schedule) & (settled["method"] == method)]
        if known != NO_PLACE:
            alike = alike[alike["place"] == known]
        same = alike[alike["variant"] == variant]
        fitting = same if variant or len(same) else alike
        is_clear = len(fitting) and len({*fitting["place"]} - {NO_PLACE}) <= 1
        homes.loc[i] = fitting.iloc[0] if is_clear else [schedule, method, variant, NO_PLACE]
        settled = pd.concat([settled, homes.loc[[i]]])
    keys = [homes[key] for key in _REPEAT]
    return [
        Group(schedule, method, variant, home, members)
        for (schedule, method, variant, home), members in compared.groupby(keys, sort=False)
    ]


def schedule_rank(schedule: str) -> tuple[int, str]:
    """Return what sorts schedules: the paper's order, then by name."""
    known = schedule in SCHEDULES
    return SCHEDULES.index(schedule) if known else len(SCHEDULES), schedule


def place(run: Run) -> str:
    """Return the values of ``PLACE`` as a reader would put them."""
    if run.told is None:
        return NO_PLACE
    ranks = run.summary.emulated_ranks
    emulated = "" if ranks is None else f"{ranks} emulated ranks on "
    return f"{emulated}{run.summary.n_devices} x {run.summary.device}, {run.summary.model}"


def _baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    if run.method == "none":
        return run
    candidates = [
        other
        for other in runs
        if other.method == "none"
        and other.status == FINISHED
        and (other.schedule, other.seed, place(other)) == (run.schedule, run.seed, place(run))
        and _is_same_work(other, run)
    ]
    started = _started(run)
    return min(candidates, key=lambda other: abs(_started(other) - started), default=None)


def _is_same_work(none: Run, run: Run) -> bool:
    """Tell whether a run of none did the work of another run, as far as both are known.

    Beyond what a step has to do, that is what was varied, such as the steps or the learning rate.
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


def _started(run: Run) -> datetime:
    return datetime.fromisoformat(run.summary.started_at)


def _variants(runs: Sequence[Run]) -> dict[Path, str]:
    """Return by folder the settings that set a run apart from its method's others in its place.

    One that did not end may not know its place, and is set apart from its method's runs anywhere.
    """
    told: dict[Path, str] = {}
    for method in dict.fromkeys(run.method for run in runs):
        members = [run for run in runs if run.method == method]
        homes = {place(run) for run in members if run.told is not None} or {NO_PLACE}
        for home in sorted(homes):
            alike = [run for run in members if place(run) in (home, NO_PLACE)]
            settings, asked = [run.settings for run in alike], [run.variant for run in alike]
            texts = variants(method, settings, asked)
            told |= dict(zip([run.folder for run in alike], texts, strict=True))
    return told


def _position(line: dict[str, Any]) -> tuple[Any, ...]:
    seed = line["seed"]
    # Peers stand below the method whose time they are given.
    peer, method = split_peer(line["method"]) or ("", line["method"])
    return (
        schedule_rank(line["schedule"]), method != "none", method, peer,
        _by_numbers(line["variant"]), -1 if seed is None else seed, str(line["folder"]),
    )  # fmt: skip


def _by_numbers(text: str) -> list[tuple[float, str]]:
    """Return what sorts texts with numbers in them by their size, 8 before 16."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]
