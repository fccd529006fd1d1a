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

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from prediction_table import excess

from timelyfreeze.files import listed, parse_json
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
)

# What a pipeline has done under one schedule.
BATCHES = "batches.json"
# What a batch froze, besides plans, which are named by their cap.
NOTHING, EVERYTHING = "nothing", "everything"
# The column of what the optimizer step of a batch took.
STEP = "step"
_PATTERNS: Mapping[str, Pattern] = {NOTHING: UNFROZEN, EVERYTHING: FROZEN}


@dataclass(frozen=True)
class Batches:
    """All batches of one pipeline.

    Attributes:
        pipeline: Such as ``real:2``.
        schedule: Its name.
        machine: What it ran on.
        order: The order that ran.
        actions: Of each process, in the order of execution; an emulated pipeline has one process.
        n_processors: As for ``play_batch``.
        p2p_latency_ms: Of each link, as measured before.
        plans: By cap, as a batch's mode names it.
        times_ms: A row for each warm batch, oldest first, milliseconds. The index has its mode
            (``nothing``, ``everything``, or the cap of a plan, such as ``0.8``), its round and its
            number; each round has batches of every mode. Columns are ``STEP``, ``span_of`` each
            rank, and the actions.
    """

    pipeline: str
    schedule: str
    machine: str
    order: ScheduleOrder
    actions: tuple[tuple[Action, ...], ...]
    n_processors: float | None
    p2p_latency_ms: Mapping[tuple[int, int], float]
    plans: Mapping[str, FreezePlan]
    times_ms: pd.DataFrame


class Pair(NamedTuple):
    """A time as predicted and as measured, milliseconds."""

    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Measured over predicted, minus 1."""
        return excess(self.measured, self.predicted)


@dataclass(frozen=True)
class Outcome:
    """A plan's prediction beside what was measured; milliseconds.

    Attributes:
        unfrozen_ms: Batch with nothing frozen.
        batch_ms: Batch under the plan.
        step_ms: Step under the plan: the batch and what an unfrozen step takes besides.
        unfrozen_step_ms: Measured step with nothing frozen.
    """

    unfrozen_ms: Pair
    batch_ms: Pair
    step_ms: Pair
    unfrozen_step_ms: float


def at_equal_speed(batches: Batches) -> tuple[Batches, list[float]]:
    """Return the batches as on a machine that never changes its speed, and the drift of each.

    They are divided by their drift: how slow the machine was in them, 1.0 being the median.

    Raises:
        ValueError: If the plans leave no forward untouched.
    """
    untouched = _untouched(batches)
    if not untouched:
        raise ValueError("the plans shorten every forward, so none tells how slow the machine was")
    forwards = batches.times_ms[untouched]
    drift = (forwards / forwards.median()).median(axis="columns")
    return replace(batches, times_ms=batches.times_ms.div(drift, axis="index")), drift.tolist()


def _untouched(batches: Batches) -> list[Action]:
    """Return the forwards that are the same in every mode.

    Where a stage and all in front of it are frozen whole, a forward keeps nothing for a backward
    and is shorter. With everything frozen that is the first stage.
    """
    dag = build_dag(batches.order)
    depths = [skip_depths(dag, plan.ratios) for plan in batches.plans.values()]
    return [
        action
        for action in dag.actions
        if action.kind is ActionKind.FORWARD
        and action.stage >= max([1, *(depth.get(action.microbatch, 0) for depth in depths)])
    ]


def outcome(batches: Batches, cap: str, rounds: Iterable[int] | None = None) -> Outcome:
    """Predict the batch under a plan from the batches beside it.

    Args:
        batches: As measured or at equal speed.
        cap: Names the plan.
        rounds: Those to take, one as often as it is named; None for all.

    Raises:
        ValueError: If times are missing or make no sense.
    """
    times_ms = batches.times_ms
    if rounds is not None:
        rows = times_ms.groupby(level="round").indices
        times_ms = times_ms.iloc[np.concatenate([rows[number] for number in rounds])]
    modes = dict(list(times_ms.groupby(level="mode")))
    ranks = [_rank_times(modes, rank, mine) for rank, mine in enumerate(batches.actions)]
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
        rows = [
            RankBatches(
                tuple((Phase.STABLE.value, ms) for ms in modes[mode][span_of(rank)]),
                modes[mode][list(actions)].median().to_dict(),
            )
            for rank, actions in enumerate(batches.actions)
        ]
        return float(np.median(batch_times(dag, rows, delays_ms)[Phase.STABLE]))

    unfrozen_ms, batch_ms = measured_ms(NOTHING), measured_ms(cap)
    steps_ms = {mode: float(modes[mode][STEP].median()) for mode in (NOTHING, cap)}
    outside_ms = max(0.0, steps_ms[NOTHING] - unfrozen_ms)
    return Outcome(
        unfrozen_ms=Pair(predicted.unfrozen_batch_ms, unfrozen_ms),
        batch_ms=Pair(predicted.batch_ms, batch_ms),
        step_ms=Pair(predicted.batch_ms + outside_ms, steps_ms[cap]),
        unfrozen_step_ms=steps_ms[NOTHING],
    )


def resampled(batches: Batches, cap: str, n_samples: int, seed: int = 0) -> list[Outcome]:
    """Return outcomes of rounds drawn with replacement: how far chance alone moves one."""
    rounds = sorted(set(batches.times_ms.index.get_level_values("round")))
    draws = np.random.default_rng(seed).choice(rounds, size=(n_samples, len(rounds)))
    return [outcome(batches, cap, draw.tolist()) for draw in draws]


def span_of(rank: int) -> str:
    """Return the column of what a rank's part of a batch took."""
    return f"span of rank {rank}"


def _rank_times(
    modes: Mapping[str, pd.DataFrame], rank: int, actions: Iterable[Action]
) -> RankTimes:
    patterns = []
    for mode, pattern in _PATTERNS.items():
        mine = modes[mode]
        times = {action: mine[action].dropna().tolist() for action in actions}
        patterns.append(PatternTimes(pattern, times, tuple(mine[span_of(rank)])))
    return RankTimes(tuple(patterns))


def batches_from_json(text: str) -> Batches:
    """Read what the worker of ``prediction_turns.py`` wrote.

    Raises:
        ValueError: If the text has another form.
    """
    try:
        data: dict[str, Any] = parse_json(text)
        order = order_from_csv(data["order"])
        plans = {cap: plan_from_json(plan) for cap, plan in data["plans"].items()}
        rows = {
            (turn["mode"], int(turn["round"]), i): _times_of(turn)
            for i, turn in enumerate(data["turns"])
        }
        names = ["mode", "round", "number"]
        times_ms = pd.DataFrame(rows.values(), pd.MultiIndex.from_tuples(rows, names=names))
        if missing := {NOTHING, EVERYTHING, *plans} - set(times_ms.index.get_level_values("mode")):
            raise ValueError(f"no batch froze {listed(sorted(missing))}")
        first = data["turns"][0]["ranks"]
        actions = tuple(tuple(map(parse_action, seen["durations_ms"])) for seen in first)
        spans = map(span_of, range(len(actions)))
        return Batches(
            pipeline=data["pipeline"],
            schedule=data["schedule"],
            machine=data["machine"],
            order=order,
            actions=actions,
            n_processors=data["n_processors"],
            p2p_latency_ms={(a, b): float(ms) for a, b, ms in data["p2p_latency_ms"]},
            plans=plans,
            times_ms=times_ms[[STEP, *spans, *itertools.chain.from_iterable(order.ranks)]],
        )
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"not the text of batches in turns: {error!r}") from error


def _times_of(turn: dict[str, Any]) -> dict[str | Action, float]:
    """Return a row of ``Batches.times_ms``."""
    row: dict[str | Action, float] = {STEP: float(turn["step_ms"])}
    for rank, seen in enumerate(turn["ranks"]):
        row[span_of(rank)] = float(seen["span_ms"])
        row |= {parse_action(a): float(ms) for a, ms in seen["durations_ms"].items()}
    return row
