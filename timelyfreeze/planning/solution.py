"""From measured times to a plan, under the cap with which a loss is reached soonest."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.lp import MAX_ACTIONS_BY_SIMPLEX, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan, plan_from_json, plan_to_json
from timelyfreeze.schedule import (
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
    order_to_csv,
)
from timelyfreeze.settings import AUTO, Phase, key
from timelyfreeze.timing import (
    UNFROZEN,
    DurationBounds,
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
    simulate_batch,
    slowest,
    slowest_replica,
    with_messages,
)

logger = logging.getLogger(__name__)

# Caps that are tried; a pipeline that takes long to solve has time for few.
_CAPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
_FEW_CAPS = (0.1, 0.2, 0.35, 0.5)
# The estimate is flat around its best: times scatter by more than what caps differ, and what frozen
# tensors cost is a formula, not measured. So the smallest cap is taken that gives up no more of the
# best one's gain than this, times the part of gradients that is lost.
_GIVEN_UP = 0.25


@dataclass(frozen=True)
class SolverChoices:
    """What a plan is solved under: arguments of ``solve_freeze_ratios``, and ``AUTO``."""

    # cap r_max, one number or one per stage; or ``settings.AUTO``
    max_freeze_ratio: float | Sequence[float] | str
    whole_stages: tuple[int, ...] = ()  # stages that are frozen whole or not at all
    n_processors: float | None = None  # how many ranks of the pipeline can compute at once, or None
    time_limit_s: float = 60.0  # limit on the solver's time, seconds
    skips_grads: bool = False  # whether backwards that nobody needs are left out


def chosen_plan(dag: PipelineDag, bounds: DurationBounds, choices: SolverChoices) -> FreezePlan:
    """Return the plan under the cap that was chosen, or under the best one.

    The best is the one that reaches a loss soonest: with the smallest product of batch time and
    estimated number of steps (``progress``); a smaller one that gains nearly as much is preferred.
    Where no freezing pays, the plan's ``time_to_loss`` says so.
    """
    if choices.max_freeze_ratio != AUTO:
        return _plan(dag, bounds, choices)
    caps = _CAPS if len(dag.actions) <= MAX_ACTIONS_BY_SIMPLEX else _FEW_CAPS
    if bounds.captured > 0.0:  # nothing is frozen to no purpose, so all of it may be
        caps = (*caps, 1.0)
    # The limit is one on all of them: whoever waits for the plan waits no longer.
    limit_s = choices.time_limit_s / len(caps)
    each = [replace(choices, max_freeze_ratio=cap, time_limit_s=limit_s) for cap in caps]
    plans = [_plan(dag, bounds, chosen) for chosen in each]
    gains = [1.0 - (plan.time_to_loss or 0.0) for plan in plans]
    best = max(gains)
    kept = 1.0 - _GIVEN_UP * (1.0 - bounds.captured)
    enough = kept * best if best > 0.0 else best
    return next(plan for plan, gain in zip(plans, gains, strict=True) if gain >= enough)


def _plan(dag: PipelineDag, bounds: DurationBounds, choices: SolverChoices) -> FreezePlan:
    plan = solve_freeze_ratios(dag, bounds, **vars(choices))
    factor = steps_factor(dag, plan.ratios, bounds.captured, bounds.captured_mean)
    return replace(plan, steps_factor=factor)


# No mean gradient is left of a tensor that is always frozen; it learns nothing at all.
_MAX_RATIO = 0.99


def steps_factor(
    dag: PipelineDag, ratios: NDArray[np.float64], captured: float = 0.0, captured_mean: float = 0.0
) -> float:
    """Return how many times as many steps a plan takes: sqrt(1 + V), V the mean over stages.

    A batch's gradient has 1 - r (1 - c) of its energy, nearly all of it noise, and 1 - r (1 - m) of
    the mean gradient. A step that is divided by the root of that energy then moves (1 - r (1 - m))
    / sqrt(1 - r (1 - c)) as far as without freezing; V follows from that, and is never below 0.
    ``captured`` is c, ``captured_mean`` m, both in [0, 1].
    """
    means = [ratios[(dag.stages == stage) & dag.freezable].mean() for stage in range(dag.n_stages)]
    return factor_of_means(np.array(means), captured, captured_mean)


def factor_of_means(means: NDArray[np.float64], captured: float, captured_mean: float) -> float:
    """Return :func:`steps_factor` for the mean ratio of each stage."""
    energy, mean = (
        1.0 - np.minimum((1.0 - part) * means, _MAX_RATIO) for part in (captured, captured_mean)
    )
    return math.sqrt(1.0 + float(np.maximum(energy / mean**2 - 1.0, 0.0).mean()))


@dataclass(frozen=True)
class Solution:
    """A plan with all that it follows from."""

    order: ScheduleOrder
    dag: PipelineDag
    bounds: DurationBounds
    plan: FreezePlan


def solve_from_times(
    ranks: Sequence[RankTimes], declared: ScheduleOrder, choices: SolverChoices
) -> Solution:
    """Plan for what the ranks measured.

    Replicas may repeat actions. If something else ran than was ``declared``, that counts.
    """
    return solve_from_bounds(*bounds_from_times(ranks, declared, choices.n_processors), choices)


def captured_parts(
    energies: Sequence[Sequence[float]], n_ranks: int
) -> tuple[float, float | None, float | None]:
    """Return what subspaces hold of the gradients' energy, of the mean gradient, and its error.

    None is what is not known. The error is the standard one of a ratio of sums, of weights that
    know nothing of each other; replicas of a pipeline's ``n_ranks`` tell of the same weights.
    """
    inside, whole, agreed_inside, agreed, *squares = np.sum(energies, axis=0).tolist()
    captured = inside / whole if whole > 0.0 else 0.0
    mean = agreed_inside / agreed if agreed > 0.0 else -1.0
    is_known = 0.0 <= mean <= 1.0  # else noise of the measurement
    if not is_known or not squares:  # which older checkpoints do not have
        return captured, mean if is_known else None, None
    inside_2, agreed_2, product = squares
    residual = inside_2 - 2.0 * mean * product + mean**2 * agreed_2
    n_replicas = max(1.0, len(energies) / n_ranks)
    return captured, mean, math.sqrt(max(n_replicas * residual, 0.0)) / agreed


def steps_error(dag: PipelineDag, plan: FreezePlan, bounds: DurationBounds) -> float | None:
    """Return the standard error of a plan's ``steps_factor``; None where it is not known."""
    error = bounds.captured_mean_error
    if error is None:
        return None
    around = (bounds.captured_mean - error, bounds.captured_mean + error)
    low, high = (
        steps_factor(dag, plan.ratios, bounds.captured, min(max(each, 0.0), 1.0)) for each in around
    )
    return (low - high) / 2.0


def solve_from_bounds(
    order: ScheduleOrder, bounds: DurationBounds, choices: SolverChoices
) -> Solution:
    """Plan for bounds that are known; errors as for :func:`solve_from_times`."""
    dag = build_dag(order)
    return Solution(order, dag, bounds, chosen_plan(dag, bounds, choices))


def solution_to_plain(solution: Solution) -> dict[str, str]:
    """Return the solution as texts, to be sent or saved; undone by ``solution_from_plain``."""
    return {
        "order": order_to_csv(solution.order),
        "bounds": bounds_to_json(solution.dag, solution.bounds),
        "plan": plan_to_json(solution.plan),
    }


def solution_from_plain(plain: Mapping[str, str]) -> Solution:
    """Return what ``solution_to_plain`` was given."""
    order = order_from_csv(plain["order"])
    dag = build_dag(order)
    bounds = bounds_from_json(dag, plain["bounds"])
    return Solution(order, dag, bounds, plan_from_json(plain["plan"]))


def check_same_pipeline(planned: ScheduleOrder, declared: ScheduleOrder) -> None:
    """Refuse a saved plan of another pipeline; another order of the same actions will do."""
    theirs = {action for rank in planned.ranks for action in rank}
    ours = {action for rank in declared.ranks for action in rank}
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's freeze plan was made for another pipeline: {len(theirs)} actions, "
            f"of which this run has {len(theirs & ours)}; resume with "
            f"{key('pipeline')} and batch sizes, or, to measure again, {key('begin_anew')}"
        )


@dataclass(frozen=True)
class RankTimes:
    """What one process measured while monitoring."""

    patterns: tuple[PatternTimes, ...]  # times of actions and batches, by what the batches froze
    # what a message from one pipeline rank to another takes, by sender and receiver, milliseconds,
    # as far as this process knows
    p2p_latency_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    # what steps took besides their batches, for each of them; in this process, which may have
    # waited for others
    outside_ms: tuple[float, ...] = ()
    # times of the batches before, which nothing is planned from
    warmup: PatternTimes = field(default_factory=lambda: PatternTimes(UNFROZEN, {}))
    # what the gradients of linear weights had inside of their subspaces, and in all, and what those
    # of batches in a row agreed on, inside and in all; of this the sums of squares and products
    energies: tuple[float, ...] = (0.0,) * 7


def bounds_from_times(
    ranks: Sequence[RankTimes],
    declared: ScheduleOrder,
    n_processors: float | None = None,
) -> tuple[ScheduleOrder, DurationBounds]:
    """Return the order that ran, and its bounds with all that was measured beside.

    Arguments as for :func:`solve_from_times`.
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
        dag, unfrozen=slowest_replica(unfrozen), frozen=slowest_replica(frozen)
    )
    if bounds.pinned and bounds.max_ms.any():  # a clock that stands still is told elsewhere
        logger.warning(
            "Freezing makes %d of %d backward actions no faster, as measured (%s ...); they are "
            "left unfrozen. If that surprises you, raise %s",
            len(bounds.pinned),
            int(dag.freezable.sum()),
            ", ".join(str(a) for a in bounds.pinned[:4]),
            key("last_monitor_step"),
        )
    bounds = replace(bounds, p2p_latency_ms=slowest(rank.p2p_latency_ms for rank in ranks))
    monitored = _Monitored(dag, ranks, n_processors)
    bounds = with_messages(dag, bounds, monitored.message_ms(bounds))
    factor = interval_factor(monitored.missed_by(bounds))
    if factor is not None:
        factor *= monitored.with_doubled_messages(bounds)
    captured, captured_mean, captured_mean_error = captured_parts(
        [each.energies for each in ranks], order.n_ranks
    )
    return order, replace(
        bounds,
        outside_ms=min(
            (float(np.median(r.outside_ms)) for r in ranks if r.outside_ms), default=0.0
        ),
        interval_factor=factor,
        captured=captured,
        captured_mean=captured if captured_mean is None else captured_mean,
        captured_mean_error=captured_mean_error,
    )


@dataclass(frozen=True)
class _Monitored:
    """The batches of warm-up and monitoring, beside a play of each from bounds."""

    dag: PipelineDag
    ranks: Sequence[RankTimes]
    n_processors: float | None

    def message_ms(self, bounds: DurationBounds) -> float:
        """Return the overhead of a message: the mean of what the batches of all patterns say.

        It depends on how busy the ranks are. Batches with nothing and with everything frozen are
        the extremes, between which a planned one lies; half frozen ones lie between them too.
        """
        delays_ms = bounds.delays_ms(self.dag)
        overheads_ms = [
            message_time(self.dag, each, float(np.median(batches)), self.n_processors, delays_ms)
            for each, batches in self._patterns(bounds)
        ]
        return sum(overheads_ms) / len(overheads_ms) if overheads_ms else 0.0

    def with_doubled_messages(self, bounds: DurationBounds) -> float:
        """Return how many times as long batches are if messages have twice their overhead.

        The overhead was fitted to batches in which ranks wait for each other, and waiting hides
        messages that are late. A plan takes that waiting away: what they cost then, no batch told.
        """
        lead_ms = bounds.lead_ms(self.dag)
        longer = (
            self._play_ms(bounds, each + lead_ms) / self._play_ms(bounds, each)
            for each, _ in self._patterns(bounds)
            if each.any()
        )
        return max(longer, default=1.0)

    def missed_by(self, bounds: DurationBounds) -> list[float]:
        """Return measured over played time of each batch, whatever it froze, oldest first."""
        warmup = self._batches([rank.warmup for rank in self.ranks], bounds)
        missed_by = []
        for durations_ms, batches_ms in [(bounds.max_ms, warmup), *self._patterns(bounds)]:
            played_ms = self._play_ms(bounds, durations_ms)
            missed_by += [each / played_ms if played_ms > 0.0 else 0.0 for each in batches_ms]
        return missed_by

    def _play_ms(self, bounds: DurationBounds, durations_ms: NDArray[np.float64]) -> float:
        delays_ms = bounds.delays_ms(self.dag)
        return simulate_batch(self.dag, durations_ms, self.n_processors, delays_ms)[1]

    def _patterns(
        self, bounds: DurationBounds
    ) -> Iterator[tuple[NDArray[np.float64], tuple[float, ...]]]:
        """Yield what actions take by the bounds, and the timed batches, of each pattern; ms."""
        for pattern in dict.fromkeys(each.pattern for rank in self.ranks for each in rank.patterns):
            none = PatternTimes(pattern, {})
            found = [
                next((each for each in rank.patterns if each.pattern == pattern), none)
                for rank in self.ranks
            ]
            if batches_ms := self._batches(found, bounds):
                is_frozen = [pattern.freezes(action) for action in self.dag.actions]
                yield np.where(is_frozen, bounds.min_ms, bounds.max_ms), batches_ms

    def _batches(self, ranks: Sequence[PatternTimes], bounds: DurationBounds) -> tuple[float, ...]:
        """Return the time of each batch from each rank's action times and spans."""
        batches = [
            RankBatches(
                tuple((Phase.STABLE.value, span_ms) for span_ms in rank.spans_ms),
                {action: float(np.median(values)) for action, values in rank.times.items()},
            )
            for rank in ranks
        ]
        return batch_times(self.dag, batches, bounds.delays_ms(self.dag)).get(Phase.STABLE, ())
