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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from timelyfreeze.compare.metrics import COLUMNS, Terms
from timelyfreeze.compare.peers import PEER_KEYS, freezes, split_peer
from timelyfreeze.compare.runs import FINISHED, Run

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

# Flat: a key is the name of section and option, as on the command line.
Settings = Mapping[str, Any]
# How long a step takes depends on these, apart from the freezing.
WORK = ("model", "training", "parallelism", "activation_checkpoint", "compile", "quantize",
        "emulation")  # fmt: skip
SECTIONS = (*WORK, "optimizer", "lr_scheduler", "data", "freezing")
# What a comparison varies by itself, where files lie, and what changes no metric.
LEFT_OUT = frozenset({
    "freezing.method", "freezing.seed", "data.seed", "training.seed",
    "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
    "training.dataset_path", "training.gc_freq", "training.gc_debug", "model.hf_assets_path",
    "model.tokenizer_path", "model.print_after_conversion",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
})  # fmt: skip
# Readers know options of these sections without their section.
_SHORT = re.compile(r"^(freezing|parallelism|training)\.")


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

    A run that did not end may not know its place; it goes with the first group of its method.
    """
    homes = compared[_REPEAT].copy()
    is_finished = compared["status"] == FINISHED
    settled = homes[is_finished]
    for i, (schedule, method, variant, _) in homes[~is_finished].iterrows():
        alike = settled[(settled["schedule"] == schedule) & (settled["method"] == method)]
        same = alike[alike["variant"] == variant]
        home = (same if len(same) else alike)[:1]
        homes.loc[i] = home.iloc[0] if len(home) else [schedule, method, variant, NO_PLACE]
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
        # A peer has less to do in a step than none, and is held against it for that.
        and (split_peer(run.method) or not work_differs(other.settings, run.settings))
    ]
    started = _started(run)
    return min(candidates, key=lambda other: abs(_started(other) - started), default=None)


def _started(run: Run) -> datetime:
    return datetime.fromisoformat(run.summary.started_at)


def _variants(runs: Sequence[Run]) -> dict[Path, str]:
    """Return by folder the settings that set a run apart from its method's others in its place."""
    alike: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.method, place(run)), []).append(run)
    return {
        run.folder: text
        for (method, _), members in alike.items()
        for run, text in zip(members, variants(method, [r.settings for r in members]), strict=True)
    }


def _position(line: dict[str, Any]) -> tuple[Any, ...]:
    seed = line["seed"]
    # Peers stand below the method whose time they are given.
    peer, method = split_peer(line["method"]) or ("", line["method"])
    return (
        schedule_rank(line["schedule"]), method != "none", method, peer, line["variant"],
        -1 if seed is None else seed, str(line["folder"]),
    )  # fmt: skip


def work_differs(one: Settings, other: Settings) -> bool:
    """Tell whether steps of two runs have something else to do, as far as both are known.

    How many steps there are is no part of it.
    """
    return any(
        key in other and other[key] != value
        for key, value in one.items()
        if key.split(".")[0] in WORK and key not in LEFT_OUT and key != "training.steps"
    )


def variants(method: str, settings: Sequence[Settings]) -> list[str]:
    """Return of each run the settings in which it differs from other runs of its method.

    Seeds, schedules and the options of other methods count for nothing, for ``none`` and its peers
    no option of the freezing, and for peers nothing that is fitted.

    Settings are flat, and empty where they are not known. The text is such as ``max_freeze_ratio
    0.5``, and empty where runs do not differ.
    """
    counting = [{key: own[key] for key in own if _counts(key, method)} for own in settings]
    written = pd.DataFrame([{key: repr(own[key]) for key in own} for own in counting])
    apart = {key for key in written if written[key].nunique() > 1}
    return [
        ", ".join(f"{_SHORT.sub('', key)} {value}" for key, value in own.items() if key in apart)
        for own in counting
    ]


def _counts(key: str, method: str) -> bool:
    """Return whether ``key`` may set runs of ``method`` apart."""
    section, *options = key.split(".")
    if section not in SECTIONS or key in LEFT_OUT:
        return False
    if split_peer(method) and key in PEER_KEYS:
        return False
    is_of_other = len(options) > 1 and options[0] not in method.split("+")
    return section != "freezing" or (freezes(method) and not is_of_other)
