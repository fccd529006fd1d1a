"""Timelines: actions of all ranks in a batch, run or predicted, with their times.

Source of plots and traces. Either predicted, from a plan and its bounds, or measured, from a batch
on all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.files import (
    Count,
    Fraction,
    Milliseconds,
    OneOf,
    json_lines,
    parse_json,
    read_dataclass,
    to_plain,
)
from timelyfreeze.planning import FreezePlan
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    build_order,
    critical_positions,
)
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds, play_actions

MEASURED = "measured"
PREDICTED = "predicted"
# Phases whose batches are examples of training without freezing, and with; the best ones first.
UNFROZEN = (Phase.UPPER_BOUND, Phase.WARMUP)
FROZEN = (Phase.STABLE, Phase.OFF)
_PHASE_WORDS = {
    Phase.WARMUP: "without freezing",
    Phase.UPPER_BOUND: "without freezing",
    Phase.LOWER_BOUND: "with everything frozen",
    Phase.MIXED: "in mixed monitoring",
    Phase.RAMP: "in the ramp",
    Phase.STABLE: "with freezing",
    Phase.CONTROL: "without freezing",
    Phase.OFF: "with freezing switched off",
}
# What is said of a batch that began behind a frozen front.
FRONT_READ = "front computed before"
# What stands beside actions wherever they are shown.
KIND_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.FULL_BACKWARD: "backward",
    ActionKind.INPUT_BACKWARD: "input gradient",
    ActionKind.WEIGHT_BACKWARD: "weight gradient",
}


@dataclass(frozen=True)
class Block:
    """An action of a timeline."""

    action: Action  # what ran
    rank: Count  # where
    start_ms: Milliseconds  # when it began, since the batch did
    end_ms: Milliseconds  # when it ended
    freeze_ratio: Fraction = 0.0  # of its elements that was frozen, or is planned to be
    is_critical: bool = False  # whether it is in the chain of waiting actions that ends last

    @property
    def duration_ms(self) -> float:
        """Time from start to end, milliseconds."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class Timeline:
    """A batch of a pipeline."""

    origin: str  # ``MEASURED`` or ``PREDICTED``
    phase: Phase  # what the batch is an example of: UPPER_BOUND is without freezing, STABLE with
    blocks: tuple[Block, ...]  # every action once, rank by rank, in the order of execution
    step: int | None = None  # optimizer step that it was measured in; None if it was not
    entry_stage: int | None = None  # in which the batch began behind a frozen front; None: at it

    @property
    def words(self) -> str:
        """Kind of the batch in words, such as "without freezing"."""
        if self.phase is Phase.STABLE and not any(block.freeze_ratio for block in self.blocks):
            return "with nothing to freeze"
        return _PHASE_WORDS[self.phase] + ("" if self.entry_stage is None else f", {FRONT_READ}")

    def is_passed(self, action: Action) -> bool:
        """Return whether the batch began behind an action's stage, so the action did not run."""
        return self.entry_stage is not None and action.stage < self.entry_stage

    @cached_property
    def ran(self) -> tuple[Block, ...]:
        """The executed blocks."""
        return tuple(block for block in self.blocks if not self.is_passed(block.action))

    @cached_property
    def lanes(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each rank."""
        return tuple(tuple(lane) for _, lane in groupby(self.blocks, key=lambda b: b.rank))

    @property
    def n_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.lanes)

    @cached_property
    def order(self) -> ScheduleOrder:
        """The order of the blocks."""
        return build_order([[block.action for block in lane] for lane in self.lanes])

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of positions in ``blocks``: the second waits for the first."""
        return tuple((i, j) for i, j in build_dag(self.order).edges.tolist())

    @property
    def batch_ms(self) -> float:
        """Time of the batch: when its last action ends, milliseconds."""
        return max(block.end_ms for block in self.blocks)

    @cached_property
    def rank_bubbles(self) -> tuple[float, ...]:
        """Idle fraction of the batch by rank, in [0, 1]."""
        batch_ms = self.batch_ms
        if batch_ms <= 0.0:
            return (0.0,) * self.n_ranks
        busy_ms = (sum(block.duration_ms for block in lane) for lane in self.lanes)
        return tuple(max(0.0, 1.0 - ms / batch_ms) for ms in busy_ms)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time, in [0, 1]."""
        return sum(self.rank_bubbles) / self.n_ranks


def predicted_timelines(
    dag: PipelineDag, bounds: DurationBounds, plan: FreezePlan, n_processors: float | None = None
) -> tuple[Timeline, Timeline]:
    """Return a plan's predicted batch: without freezing, and under the plan.

    ``n_processors`` is the number of ranks computing at once; None for a device per rank. A plan of
    another pipeline is a ValueError.
    """
    if plan.actions != dag.actions:
        raise ValueError(
            f"the plan's {len(plan.actions)} actions and the schedule's {len(dag.actions)} are not "
            "the same in the same order; they belong to different pipelines"
        )
    delays_ms, nothing = bounds.delays_ms(dag), np.zeros(len(dag.actions))
    played = []
    for phase, durations_ms, ratios in (
        (Phase.UPPER_BOUND, bounds.max_ms, nothing),
        (Phase.STABLE, plan.durations_ms, plan.ratios),
    ):
        start, end = play_actions(dag, durations_ms, n_processors, delays_ms)
        played.append(timeline_of(PREDICTED, phase, dag, start, end, ratios, delays_ms))
    return played[0], played[1]


def timeline_of(
    origin: str,
    phase: Phase,
    dag: PipelineDag,
    start_ms: NDArray[np.float64],
    end_ms: NDArray[np.float64],
    ratios: NDArray[np.float64],
    delays_ms: ArrayLike,
    step: int | None = None,
    entry_stage: int | None = None,
) -> Timeline:
    """Return the timeline of a graph's A actions; all arrays have shape [A].

    Times are milliseconds since the batch began, ratios frozen fractions in [0, 1]; delays are as
    for :func:`critical_positions`, the rest as in the timeline.
    """
    critical = set(critical_positions(dag, end_ms, delays_ms))
    columns = zip(
        dag.actions,
        dag.ranks.tolist(),
        start_ms.tolist(),
        end_ms.tolist(),
        ratios.tolist(),
        # What the batch passed by is not waited for.
        (i in critical and a.stage >= (entry_stage or 0) for i, a in enumerate(dag.actions)),
        strict=True,
    )
    blocks = tuple(Block(*values) for values in columns)
    return Timeline(origin, phase, blocks, step, entry_stage)


@dataclass(frozen=True)
class _TimelineFile:
    """A timeline as in ``Timeline``, blocks by action."""

    origin: Annotated[str, OneOf(MEASURED, PREDICTED)]
    phase: Phase
    step: Count | None
    actions: Mapping[Action, Mapping[str, Any]]
    entry_stage: Count | None = None


_TOLD = ("origin", "phase", "step", "entry_stage", "batch_ms", "bubble", "rank_bubbles")


def timeline_to_json(timeline: Timeline) -> str:
    """Write a timeline as JSON, a line an action, with batch time and bubbles for readers."""
    names = [field.name for field in fields(Block)][1:]
    plain = {
        **{name: getattr(timeline, name) for name in _TOLD},
        "actions": {b.action: {name: getattr(b, name) for name in names} for b in timeline.blocks},
    }
    return json_lines(to_plain(plain), depth=2) + "\n"


def timeline_file(run_folder: Path, phase: Phase) -> Path:
    """Return the file of a phase's measured batch."""
    return run_folder / "timelines" / f"{MEASURED}_{phase.value}.json"


def timeline_from_json(text: str) -> Timeline:
    """Read the timeline of ``timeline_to_json``; a ValueError for incomplete pipelines."""
    try:
        file = read_dataclass(_TimelineFile, parse_json(text), partly=True)
        blocks = []
        for action, row in file.actions.items():
            # Of what the file lacks None, which is no number and no truth.
            whole = {"freeze_ratio": None, "is_critical": None, **row, "action": str(action)}
            blocks.append(read_dataclass(Block, whole, f"actions.{action}", partly=True))
    except ValueError as error:
        raise ValueError(f"not the text of a timeline: {error}") from error
    timeline = Timeline(file.origin, file.phase, tuple(blocks), file.step, file.entry_stage)
    if [lane[0].rank for lane in timeline.lanes] != list(range(timeline.n_ranks)):
        raise ValueError("the timeline's actions are not sorted by rank, or a rank has none")
    for block in blocks:
        if not block.start_ms <= block.end_ms:
            raise ValueError(
                f"action {block.action} runs from {block.start_ms} to {block.end_ms} ms; it must "
                "not end before it begins"
            )
    n_stages = timeline.order.n_stages  # refuses what is no complete pipeline
    if file.entry_stage is not None and file.entry_stage >= n_stages:
        raise ValueError(f"entry_stage is {file.entry_stage}; the stages are 0 to {n_stages - 1}")
    return timeline
