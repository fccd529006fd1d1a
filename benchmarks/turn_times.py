"""What batches in turns say of predictions: the same batches predicted and measured side by side.

One pipeline runs batches with nothing frozen, with everything frozen and under plans, a few of each
in turn, over and over. Bounds come from the first two kinds, predictions from the bounds, and both
are of the same minutes as the measured batches: a machine that is slower in the afternoon than in
the morning is so for all of them.

A shared machine also changes its speed from one second to the next, by more than predictions may
miss. So the times of a batch are divided by how slow the machine was in it: by its forwards, which
no freezing shortens, against the median of the same forwards over all batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from prediction_table import excess

from timelyfreeze.planning import (
    FreezePlan,
    RankTimes,
    bounds_from_times,
    plan_from_json,
    plan_from_ratios,
    skip_depths,
)
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    ScheduleOrder,
    build_dag,
    order_from_csv,
    parse_action,
)
from timelyfreeze.settings import Phase
from timelyfreeze.timing import (
    FROZEN,
    UNFROZEN,
    Pattern,
    PatternTimes,
    RankBatches,
    batch_times,
    median_of_each,
)

# What a pipeline has done under one schedule.
BATCHES = "batches.json"
# What a batch froze, besides plans, which are named by their cap.
NOTHING, EVERYTHING = "nothing", "everything"
_PATTERNS: Mapping[str, Pattern] = {NOTHING: UNFROZEN, EVERYTHING: FROZEN}


@dataclass(frozen=True)
class RankBatch:
    """What one rank saw of one batch; milliseconds."""

    durations_ms: Mapping[Action, float]
    span_ms: float


@dataclass(frozen=True)
class Turn:
    """One batch.

    Attributes:
        mode: ``nothing``, ``everything``, or the cap of a plan, such as ``0.8``.
        round: Number of the round it belongs to; each has batches of every mode.
        ranks: What each process saw.
        step_ms: The optimizer step that the batch was, milliseconds.
    """

    mode: str
    round: int
    ranks: tuple[RankBatch, ...]
    step_ms: float

    def slowed(self, factor: float) -> Turn:
        """Return the batch on a machine that many times as slow."""
        ranks = tuple(
            RankBatch({a: factor * ms for a, ms in r.durations_ms.items()}, factor * r.span_ms)
            for r in self.ranks
        )
        return replace(self, ranks=ranks, step_ms=factor * self.step_ms)


@dataclass(frozen=True)
class Batches:
    """All turns of one pipeline.

    Attributes:
        pipeline: Such as ``real:2``.
        schedule: Its name.
        machine: What it ran on.
        order: The order that ran.
        n_processors: As for ``play_batch``.
        p2p_latency_ms: Of each link, as measured before.
        plans: By cap, as in ``Turn.mode``.
        turns: Warm batches, oldest first.
    """

    pipeline: str
    schedule: str
    machine: str
    order: ScheduleOrder
    n_processors: float | None
    p2p_latency_ms: Mapping[tuple[int, int], float]
    plans: Mapping[str, FreezePlan]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Outcome:
    """A plan's prediction beside what was measured; milliseconds.

    Attributes:
        unfrozen_ms: Predicted and measured batch with nothing frozen.
        batch_ms: Predicted and measured batch under the plan.
        step_ms: Predicted and measured step under the plan: the batch and what an unfrozen step
            takes besides its batch.
        unfrozen_step_ms: Measured step with nothing frozen.
    """

    unfrozen_ms: tuple[float, float]
    batch_ms: tuple[float, float]
    step_ms: tuple[float, float]
    unfrozen_step_ms: float

    @property
    def error(self) -> float | None:
        """Measured batch over predicted, minus 1."""
        return excess(*reversed(self.batch_ms))

    @property
    def unfrozen_error(self) -> float | None:
        """Likewise with nothing frozen."""
        return excess(*reversed(self.unfrozen_ms))

    @property
    def step_error(self) -> float | None:
        """Likewise of the step under the plan."""
        return excess(*reversed(self.step_ms))


def at_equal_speed(batches: Batches) -> tuple[Batches, list[float]]:
    """Return the turns as on a machine that never changes its speed, and how slow each was.

    Args:
        batches: Turns as measured.

    Returns:
        The same turns divided by their drift, and the drift of each, 1.0 being the median.

    Raises:
        ValueError: If the plans leave no forward untouched.
    """
    untouched = _untouched(batches)
    if not untouched:
        raise ValueError("the plans shorten every forward, so none tells how slow the machine was")
    forwards = pd.DataFrame(
        {a: ms for rank in turn.ranks for a, ms in rank.durations_ms.items() if a in untouched}
        for turn in batches.turns
    )
    drift = (forwards / forwards.median()).median(axis="columns").tolist()
    turns = tuple(turn.slowed(1.0 / slow) for turn, slow in zip(batches.turns, drift, strict=True))
    return replace(batches, turns=turns), drift


def _untouched(batches: Batches) -> set[Action]:
    """Return the forwards that are the same in every mode.

    Where a stage and all in front of it are frozen whole, a forward keeps nothing for a backward
    and is shorter. With everything frozen that is the first stage.
    """
    dag = build_dag(batches.order)
    depths: dict[int, int] = {}
    for plan in batches.plans.values():
        for microbatch, depth in skip_depths(dag, plan.ratios).items():
            depths[microbatch] = max(depth, depths.get(microbatch, 0))
    return {
        action
        for action in dag.actions
        if action.kind is ActionKind.FORWARD
        and action.stage >= max(1, depths.get(action.microbatch, 0))
    }


def outcome(batches: Batches, cap: str, rounds: Iterable[int] | None = None) -> Outcome:
    """Predict the batch under a plan from the turns beside it.

    Args:
        batches: Turns, as measured or at equal speed.
        cap: Names the plan.
        rounds: Those to take, one as often as it is named; None for all.

    Raises:
        ValueError: If times are missing or make no sense.
    """
    turns = _of_rounds(batches.turns, rounds)
    ranks = [_rank_times(turns, rank) for rank in range(len(turns[0].ranks))]
    ranks[0] = replace(ranks[0], p2p_latency_ms=batches.p2p_latency_ms)
    _, bounds = bounds_from_times(ranks, batches.order, batches.n_processors)
    dag = build_dag(batches.order)
    plan = batches.plans[cap]
    # What can not be made faster, as measured this time, has ratio 0 by definition.
    ratios = np.where(bounds.max_ms > bounds.min_ms, [plan.ratio_of(a) for a in dag.actions], 0.0)
    predicted = plan_from_ratios(
        dag, bounds, ratios, n_processors=batches.n_processors, skips_grads=True
    )
    delays_ms = bounds.delays_ms(dag)

    def measured_ms(mode: str) -> float:
        mine = [turn for turn in turns if turn.mode == mode]
        rows = [
            RankBatches(
                tuple((Phase.STABLE.value, turn.ranks[rank].span_ms) for turn in mine),
                median_of_each([turn.ranks[rank].durations_ms for turn in mine]),
            )
            for rank in range(len(ranks))
        ]
        return float(np.median(batch_times(dag, rows, delays_ms)[Phase.STABLE]))

    unfrozen_ms, batch_ms = measured_ms(NOTHING), measured_ms(cap)
    steps_ms = {
        mode: statistics.median(turn.step_ms for turn in turns if turn.mode == mode)
        for mode in (NOTHING, cap)
    }
    outside_ms = max(0.0, steps_ms[NOTHING] - unfrozen_ms)
    return Outcome(
        unfrozen_ms=(predicted.unfrozen_batch_ms, unfrozen_ms),
        batch_ms=(predicted.batch_ms, batch_ms),
        step_ms=(predicted.batch_ms + outside_ms, steps_ms[cap]),
        unfrozen_step_ms=steps_ms[NOTHING],
    )


def resampled(batches: Batches, cap: str, n_samples: int, seed: int = 0) -> list[Outcome]:
    """Return outcomes of rounds drawn with replacement: how far chance alone moves one."""
    rounds = sorted({turn.round for turn in batches.turns})
    random = np.random.default_rng(seed)
    draws = random.choice(rounds, size=(n_samples, len(rounds)))
    return [outcome(batches, cap, draw.tolist()) for draw in draws]


def _of_rounds(turns: Sequence[Turn], rounds: Iterable[int] | None) -> list[Turn]:
    if rounds is None:
        return list(turns)
    return [turn for number in rounds for turn in turns if turn.round == number]


def _rank_times(turns: Sequence[Turn], rank: int) -> RankTimes:
    patterns = []
    for mode, pattern in _PATTERNS.items():
        mine = [turn.ranks[rank] for turn in turns if turn.mode == mode]
        times: dict[Action, list[float]] = {}
        for one in mine:
            for action, ms in one.durations_ms.items():
                times.setdefault(action, []).append(ms)
        patterns.append(PatternTimes(pattern, times, tuple(one.span_ms for one in mine)))
    return RankTimes(tuple(patterns))


def batches_from_json(text: str) -> Batches:
    """Read what the worker of ``prediction_turns.py`` wrote.

    Raises:
        ValueError: If the text has another form.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        return Batches(
            pipeline=data["pipeline"],
            schedule=data["schedule"],
            machine=data["machine"],
            order=order_from_csv(data["order"]),
            n_processors=data["n_processors"],
            p2p_latency_ms={(a, b): float(ms) for a, b, ms in data["p2p_latency_ms"]},
            plans={cap: plan_from_json(plan) for cap, plan in data["plans"].items()},
            turns=tuple(map(_turn, data["turns"])),
        )
    except (
        *(LookupError, TypeError, AttributeError),
        *(ArithmeticError, RecursionError, ValueError),
    ) as error:
        raise ValueError(f"not the text of batches in turns: {error!r}") from error


def _turn(plain: dict[str, Any]) -> Turn:
    ranks = tuple(
        RankBatch(
            {parse_action(a): float(ms) for a, ms in rank["durations_ms"].items()},
            float(rank["span_ms"]),
        )
        for rank in plain["ranks"]
    )
    return Turn(plain["mode"], int(plain["round"]), ranks, float(plain["step_ms"]))
