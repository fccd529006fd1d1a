"""Gain of a cached front: whether reading is faster than computing, and its use."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any

from timelyfreeze.schedule import Action, ActionKind, PipelineDag, makespan
from timelyfreeze.timing import median_of_each, slowest

# Batches of each kind that are timed before it is decided, and at most; the first of a kind runs
# cold.
N_COMPUTED, N_ENTERED, N_TIMED = 3, 4, 16

Times = dict[Action, float]


@dataclass
class FrontTimes:
    """Measured times of a rank's batches at a depth; milliseconds."""

    # times of each action in batches that ran through the front
    computed: list[Mapping[Action, float]] = field(default_factory=list)
    # the same in batches that began behind it
    entered: list[Mapping[Action, float]] = field(default_factory=list)
    # how long the training waited for the rows of each batch that began behind it, from the second
    # step with such batches on; empty on ranks that do not read
    read_ms: list[float] = field(default_factory=list)

    def summary(self) -> tuple[Times, Times, float | None]:
        """Return medians: of actions when computed, when entered, and of reading a batch."""
        read_ms = statistics.median(self.read_ms) if self.read_ms else None
        return median_of_each(self.computed[1:]), median_of_each(self.entered[1:]), read_ms


@dataclass(frozen=True)
class CacheDecision:
    """Savings and costs of a batch."""

    saved_ms: float  # by how much it is shorter if it begins behind the front
    read_ms: float  # how long the training waits until its rows are read

    @property
    def pays(self) -> bool:
        """Whether reading is faster than the computation saved."""
        return self.read_ms < self.saved_ms


def verdict(
    dag: PipelineDag, ranks: Sequence[tuple[Times, Times, float | None]], stage: int
) -> CacheDecision | None:
    """Compare a batch, simulated from measured times, with and without the front.

    All but the forwards up to the first live block take the same time in both, so that a busy
    machine does not count. The slowest replica's times count. ``stage`` has the first live block.
    None if an action was not measured.
    """
    computed = slowest(times for times, _, _ in ranks)
    entered = slowest(times for _, times, _ in ranks)
    read_ms = [ms for _, _, ms in ranks if ms is not None]
    if not read_ms or any(a not in computed or a not in entered for a in dag.actions):
        return None
    shorter = {
        action: ms
        for action, ms in entered.items()
        if action.kind is ActionKind.FORWARD and action.stage <= stage
    }
    saved_ms = _batch_ms(dag, computed) - _batch_ms(dag, {**computed, **shorter})
    return CacheDecision(saved_ms, max(read_ms))


def _batch_ms(dag: PipelineDag, times: Times) -> float:
    return makespan(dag, [times[action] for action in dag.actions])


@dataclass(frozen=True)
class CacheUse:
    """Counts since the run began or was resumed."""

    batches: int  # batches with a frozen front
    entered: int  # those of them that began behind it
    memory_bytes: int  # rows in memory, now
    disk_bytes: int  # rows on the disk, now
    spent_ms: float  # what reading, copying and digests of weights took of the training's time
    # what the batches that began behind the front were shorter by, estimated from measured times;
    # None before any could be compared
    saved_ms: float | None
    read_ahead: int = 0  # rows of the disk that were in memory when they were needed


def use_of_all(ranks: Sequence[CacheUse]) -> CacheUse:
    """Sum up the uses of a pipeline's processes, whose batches begin alike."""
    return _joined(ranks, {"batches": max, "entered": max, "saved_ms": max})


def use_of_parts(former: CacheUse | None, latest: CacheUse | None) -> CacheUse | None:
    """Sum up the uses of two parts of a run; stored rows are the present ones."""
    if former is None or latest is None:
        return former or latest
    now = itemgetter(-1)
    return _joined([former, latest], {"memory_bytes": now, "disk_bytes": now})


def _joined(uses: Sequence[CacheUse], ways: Mapping[str, Callable[[list[Any]], Any]]) -> CacheUse:
    """Sum up uses, each field by its rule or a sum; fields unknown to all stay None."""
    joined: dict[str, Any] = {}
    for name in (each.name for each in fields(CacheUse)):
        known = [value for use in uses if (value := getattr(use, name)) is not None]
        joined[name] = ways.get(name, sum)(known) if known else None
    return CacheUse(**joined)
