"""From measured times to a plan: the whole method, on plain values."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.cap import SolverChoices, chosen_plan
from timelyfreeze.planning.plan import FreezePlan, plan_from_json, plan_to_json
from timelyfreeze.planning.progress import VarianceCurve, merged_curves
from timelyfreeze.schedule import (
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
    order_to_csv,
)
from timelyfreeze.settings import Phase, key
from timelyfreeze.timing import (
    UNFROZEN,
    DurationBounds,
    Pattern,
    PatternTimes,
    RankBatches,
    batch_times,
    bounds_from_json,
    bounds_from_samples,
    bounds_to_json,
    executed_order,
    halves,
    interval_factor,
    message_time,
    play_batch,
    receiving,
    slowest,
    slowest_replica,
    with_messages,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankTimes:
    """What one process measured while monitoring.

    Attributes:
        patterns: Times of actions and batches, by what the batches froze.
        p2p_latency_ms: What a message from one pipeline rank to another takes, by sender and
            receiver, milliseconds, as far as this process knows.
        curves: What sampling tokens adds to the gradients of its stages.
        outside_ms: What steps took besides their batches, for each of them; in this process, which
            may have waited for others.
        warmup: Times of the batches before, which nothing is planned from.
    """

    patterns: tuple[PatternTimes, ...]
    p2p_latency_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    curves: Mapping[int, VarianceCurve] = field(default_factory=dict)
    outside_ms: tuple[float, ...] = ()
    warmup: PatternTimes = field(default_factory=lambda: PatternTimes(UNFROZEN, {}))


@dataclass(frozen=True)
class Solution:
    """A plan with all that it follows from; ``curves`` by stage, as far as they were measured."""

    order: ScheduleOrder
    dag: PipelineDag
    bounds: DurationBounds
    plan: FreezePlan
    curves: Mapping[int, VarianceCurve] = field(default_factory=dict)


def solve_from_times(
    ranks: Sequence[RankTimes], declared: ScheduleOrder, choices: SolverChoices
) -> Solution:
    """Plan for what the ranks measured.

    Args:
        ranks: Times of every process; data-parallel replicas may repeat actions.
        declared: What the schedule says it runs. If something else ran, that counts.
        choices: What the plan is solved under.

    Raises:
        ValueError: If times are missing or make no sense.
        LpError: If the solver ends without an optimum.
    """
    order, bounds = bounds_from_times(
        ranks, declared, choices.n_processors, input_grads=choices.input_fraction > 0.0
    )
    outside_ms = min((float(np.median(r.outside_ms)) for r in ranks if r.outside_ms), default=0.0)
    bounds = replace(bounds, measured_ratio=choices.measured_ratio, outside_ms=outside_ms)
    return solve_from_bounds(order, bounds, choices, merged_curves(rank.curves for rank in ranks))


def solve_from_bounds(
    order: ScheduleOrder,
    bounds: DurationBounds,
    choices: SolverChoices,
    curves: Mapping[int, VarianceCurve] | None = None,
) -> Solution:
    """Plan for bounds and curves that are known; errors as for :func:`solve_from_times`."""
    dag = build_dag(order)
    plan = chosen_plan(dag, bounds, choices, curves or {})
    return Solution(order, dag, bounds, plan, curves or {})


def bounds_from_times(
    ranks: Sequence[RankTimes],
    declared: ScheduleOrder,
    n_processors: float | None = None,
    *,
    input_grads: bool = False,
) -> tuple[ScheduleOrder, DurationBounds]:
    """Return the order that ran, and its bounds with what messages take.

    Arguments and errors are those of :func:`solve_from_times`.
    """
    order = executed_order([rank.patterns[0].times for rank in ranks if rank.patterns], declared)
    if order != declared:
        logger.warning(
            "The schedule ran in another order than it declares; the plan is for what ran:\n%s",
            order_to_csv(order),
        )
    dag = build_dag(order)
    unfrozen, frozen = zip(*(halves(rank.patterns) for rank in ranks), strict=True)
    bounds = bounds_from_samples(
        dag,
        unfrozen=slowest_replica(unfrozen),
        frozen=slowest_replica(frozen),
        input_grads=input_grads,
    )
    if bounds.pinned and bounds.max_ms.any():  # a clock that stands still is told elsewhere
        logger.warning(
            "Freezing makes %d of %d backward actions no faster, as measured (%s ...); they are "
            "left unfrozen. If that surprises you, raise %s",
            len(bounds.pinned),
            int(dag.freezable.sum()),
            ", ".join(str(a) for a in bounds.pinned[:4]),
            key("monitor"),
        )
    bounds = replace(bounds, p2p_latency_ms=slowest(rank.p2p_latency_ms for rank in ranks))
    p2p_overhead_ms = _message_time(dag, bounds, ranks, n_processors)
    bounds = with_messages(dag, bounds, p2p_overhead_ms)
    factor = interval_factor(_missed_by(dag, bounds, ranks, n_processors))
    if factor is not None:
        factor *= _with_doubled_messages(dag, bounds, ranks, n_processors)
    return order, replace(bounds, interval_factor=factor)


def _message_time(
    dag: PipelineDag, bounds: DurationBounds, ranks: Sequence[RankTimes], n_processors: float | None
) -> float:
    """Return the overhead of a message: the mean of what the batches of all patterns say.

    It depends on how busy the ranks are. Batches with nothing and with everything frozen are the
    extremes, between which a planned one lies; half frozen ones lie between them too.
    """
    delays_ms = bounds.delays_ms(dag)
    overheads_ms = [
        message_time(dag, durations_ms, float(np.median(batches_ms)), n_processors, delays_ms)
        for durations_ms, batches_ms in _timed_patterns(dag, bounds, ranks)
    ]
    return sum(overheads_ms) / len(overheads_ms) if overheads_ms else 0.0


def _with_doubled_messages(
    dag: PipelineDag, bounds: DurationBounds, ranks: Sequence[RankTimes], n_processors: float | None
) -> float:
    """Return how many times as long a batch is whose messages have twice their overhead, 1 or more.

    The overhead was fitted to batches in which ranks wait for each other, and waiting hides messages
    that are late. A plan takes that waiting away, so what they cost then was seen in no batch.
    """
    delays_ms = bounds.delays_ms(dag)
    lead_ms = bounds.p2p_overhead_ms * receiving(dag)

    def batch_ms(durations_ms: NDArray[np.float64]) -> float:
        return play_batch(dag, durations_ms, n_processors, delays_ms)[1]

    return max(
        (
            batch_ms(durations_ms + lead_ms) / batch_ms(durations_ms)
            for durations_ms, _ in _timed_patterns(dag, bounds, ranks)
            if durations_ms.any()
        ),
        default=1.0,
    )


def _missed_by(
    dag: PipelineDag, bounds: DurationBounds, ranks: Sequence[RankTimes], n_processors: float | None
) -> list[float]:
    """Return measured over played time of each batch, whatever it froze, oldest first."""
    delays_ms = bounds.delays_ms(dag)
    warmup_ms = _batches(dag, [rank.warmup for rank in ranks], delays_ms)
    timed = [(bounds.max_ms, warmup_ms), *_timed_patterns(dag, bounds, ranks)]
    missed_by = []
    for durations_ms, batches_ms in timed:
        played_ms = play_batch(dag, durations_ms, n_processors, delays_ms)[1]
        missed_by += [batch_ms / played_ms if played_ms > 0.0 else 0.0 for batch_ms in batches_ms]
    return missed_by


def _timed_patterns(
    dag: PipelineDag, bounds: DurationBounds, ranks: Sequence[RankTimes]
) -> Iterator[tuple[NDArray[np.float64], tuple[float, ...]]]:
    """Yield what actions take by the bounds, and the timed batches, of each pattern; ms."""
    delays_ms = bounds.delays_ms(dag)
    for pattern in dict.fromkeys(entry.pattern for rank in ranks for entry in rank.patterns):
        batches_ms = _batches(dag, [_of_pattern(rank, pattern) for rank in ranks], delays_ms)
        if batches_ms:
            is_frozen = [pattern.freezes(action) for action in dag.actions]
            yield np.where(is_frozen, bounds.min_ms, bounds.max_ms), batches_ms


def _of_pattern(rank: RankTimes, pattern: Pattern) -> PatternTimes:
    return next(
        (entry for entry in rank.patterns if entry.pattern == pattern), PatternTimes(pattern, {})
    )


def _batches(
    dag: PipelineDag, ranks: Sequence[PatternTimes], delays_ms: NDArray[np.float64]
) -> tuple[float, ...]:
    """Return the time of each batch from each rank's action times and spans."""
    batches = [
        RankBatches(
            tuple((Phase.STABLE.value, span_ms) for span_ms in rank.spans_ms),
            {action: float(np.median(values)) for action, values in rank.times.items()},
        )
        for rank in ranks
    ]
    return batch_times(dag, batches, delays_ms).get(Phase.STABLE, ())


def solution_to_plain(solution: Solution) -> dict[str, str]:
    """Return the solution as texts, to be sent or saved; undone by ``solution_from_plain``."""
    return {
        "order": order_to_csv(solution.order),
        "bounds": bounds_to_json(solution.dag, solution.bounds),
        "plan": plan_to_json(solution.plan),
        "variance": json.dumps(dict(solution.curves)),
    }


def solution_from_plain(plain: Mapping[str, str]) -> Solution:
    """Return what ``solution_to_plain`` was given.

    Raises:
        ValueError: If a text has another form.
    """
    order = order_from_csv(plain["order"])
    dag = build_dag(order)
    bounds = bounds_from_json(dag, plain["bounds"])
    variance = json.loads(plain["variance"])
    curves = {int(stage): tuple(curve) for stage, curve in variance.items()}
    return Solution(order, dag, bounds, plan_from_json(plain["plan"]), curves)


def check_same_pipeline(planned: ScheduleOrder, declared: ScheduleOrder) -> None:
    """Refuse a saved plan that was made for another pipeline; another order of its actions will do.

    Raises:
        ValueError: If their actions differ.
    """
    theirs = {action for rank in planned.ranks for action in rank}
    ours = {action for rank in declared.ranks for action in rank}
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's freeze plan was made for another pipeline: {len(theirs)} actions, "
            f"of which this run has {len(theirs & ours)}; resume with "
            f"{key('pipeline')} and batch sizes, or, to measure anew, {key('begin_anew')}"
        )
