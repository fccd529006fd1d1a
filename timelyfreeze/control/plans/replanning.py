"""Compares times and gain in the stable phase with the plan's.

No extra measurement is needed: the times of the last stable batches are exchanged, once every so
many steps, and rank 0 logs the result.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.planning import FreezePlan
from timelyfreeze.records.convergence import error_of_median
from timelyfreeze.runtime import Exchange
from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.settings import AUTO, Phase, key
from timelyfreeze.timing import (
    BatchRecord,
    DurationBounds,
    RankBatches,
    Samples,
    batch_times,
    rank_batches,
    simulate_batch,
    slowest_durations,
)

Group = tuple[int, ActionKind]

# Of a backward that takes less than this fraction of its unfrozen time, what is left is
# bookkeeping: it may take thrice as long as before, and says nothing of the work that is not there.
_LEAST_SHARE = 0.1


def drifts(
    dag: PipelineDag,
    bounds: DurationBounds,
    planned_ms: ArrayLike,
    observed_ms: Mapping[Action, float],
) -> dict[Group, float]:
    """Return the ratio of observed to planned times, by stage and kind.

    The median over actions, weighted by planned time: 1 without a drift. Stages and kinds without
    observed times are left out.
    """
    lead_ms = bounds.lead_ms(dag)
    planned = np.asarray(planned_ms, dtype=np.float64) - lead_ms
    least = _LEAST_SHARE * (bounds.max_ms - lead_ms)
    found: dict[Group, list[tuple[float, float]]] = {}
    for action, time_ms in observed_ms.items():
        own_ms = float(planned[dag.index[action]])
        if own_ms > max(0.0, float(least[dag.index[action]])):
            found.setdefault((action.stage, action.kind), []).append((time_ms / own_ms, own_ms))
    return {group: _weighted_median(values) for group, values in found.items()}


def forward_drift(drift: Mapping[Group, float]) -> float | None:
    """Return the drift of forwards: the median over stages of :func:`drifts`.

    Freezing shortens forwards in the first stage alone, which counts only without others: frozen
    whole, its forward keeps nothing for a backward. 1 for an unchanged machine; None without
    observed forwards.
    """
    forwards = {stage: f for (stage, kind), f in drift.items() if kind is ActionKind.FORWARD}
    behind = [factor for stage, factor in forwards.items() if stage > 0]
    factors = behind or list(forwards.values())
    return float(np.median(factors)) if factors else None


def largest_move(drift: Mapping[Group, float]) -> float:
    """Return the largest relative drift, up or down; 0 without observed times."""
    return max((abs(factor - 1.0) for factor in drift.values()), default=0.0)


def moved_bounds(
    dag: PipelineDag, bounds: DurationBounds, drift: Mapping[Group, float]
) -> DurationBounds:
    """Return bounds scaled by the drift of times; the overhead of messages stays.

    A missing kind, such as one frozen whole without any time, moves with the rest of its stage; a
    missing stage has not moved.
    """
    by_stage = {
        stage: float(np.median([factor for (s, _), factor in drift.items() if s == stage]))
        for stage, _ in drift
    }
    factors = np.array(
        [drift.get((a.stage, a.kind), by_stage.get(a.stage, 1.0)) for a in dag.actions]
    )
    lead_ms = bounds.lead_ms(dag)
    return replace(
        bounds,
        min_ms=(bounds.min_ms - lead_ms) * factors + lead_ms,
        max_ms=(bounds.max_ms - lead_ms) * factors + lead_ms,
    )


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Return the weighted median; between two values at a border."""
    pairs = np.array(sorted(values))
    reached = np.cumsum(pairs[:, 1]) / pairs[:, 1].sum()
    low, high = np.searchsorted(reached, [0.5 - 1e-9, 0.5 + 1e-9])
    return float(0.5 * (pairs[low, 0] + pairs[high, 0]))


# As many of the last batches count, so that times are recent and a checkpoint stays small.
_MOST_BATCHES = 32
# A median of fewer says little.
_FEWEST_BATCHES = 5
# One re-measurement may fall into a bad moment of the machine.
_LOW_IN_A_ROW = 2


@dataclass(frozen=True)
class DriftCheck:
    """Result of the last stable batches."""

    drift: Mapping[Group, float]  # how much longer actions take than planned, by stage and kind
    batch_ms: float  # median batch as measured
    # what a batch takes without freezing: the median of control steps, at the speed of the others;
    # without any, predicted from what was measured before, moved as far as the unfrozen actions
    unfrozen_batch_ms: float
    error: float = 0.0  # standard error of the ratio of the two, as a fraction: batches scatter

    @property
    def gain(self) -> float:
        """Gain of throughput by freezing, as a fraction."""
        return self.unfrozen_batch_ms / self.batch_ms - 1.0 if self.batch_ms > 0.0 else 0.0


def check_drift(
    now: ActivePlan,
    measured: DurationBounds,
    ranks: Sequence[RankBatches],
    controls: Sequence[RankBatches] = (),
) -> DriftCheck:
    """Compare all ranks' measurements under a plan with the plan.

    ``measured`` are the bounds from monitoring; the plan's bounds are the same, or moved since
    then. ``controls`` are of the control steps.
    """
    dag, bounds, plan = now.dag, now.bounds, now.plan
    assert bounds is not None  # there is a plan, which was made from some
    assert plan is not None
    observed_ms = slowest_durations(ranks)
    # Had frozen actions a say in it, freezing that saves nothing would look like a slow machine.
    # Neither must bounds that they have moved.
    live_ms = {
        action: time_ms
        for action, time_ms in observed_ms.items()
        if plan.durations_ms[dag.index[action]] == bounds.max_ms[dag.index[action]]
    }
    delays_ms = bounds.delays_ms(dag)
    stable_ms = batch_times(dag, ranks, delays_ms)[Phase.STABLE]
    measured_ms = [stable_ms]
    drift = drifts(dag, bounds, plan.durations_ms, observed_ms)
    if controls and all(len(rank.batches) >= _FEWEST_BATCHES for rank in controls):
        measured_ms.append(batch_times(dag, controls, delays_ms)[Phase.CONTROL])
        # Forwards, which freezing leaves alone, are the clock: the speed may have changed between.
        then = forward_drift(drifts(dag, bounds, bounds.max_ms, slowest_durations(controls)))
        clock = (forward_drift(drift) or 1.0) / (then or 1.0)
        batch_ms = statistics.median(measured_ms[-1]) * clock
    else:
        moved = moved_bounds(dag, measured, drifts(dag, measured, measured.max_ms, live_ms))
        batch_ms = simulate_batch(dag, moved.max_ms, now.n_processors, delays_ms)[1]
    return DriftCheck(
        drift=drift,
        batch_ms=statistics.median(stable_ms),
        unfrozen_batch_ms=batch_ms,
        error=math.hypot(*map(_error, measured_ms)),
    )


def _error(times_ms: Sequence[float]) -> float:
    """Return a median's relative standard error; 0 where a clock stands still."""
    median = statistics.median(times_ms)
    return error_of_median(times_ms) / median if median > 0.0 else 0.0


@dataclass(eq=False)
class DriftMonitor:
    """This rank's last stable batches, compared by all ranks together."""

    now: ActivePlan  # the plan that they ran under
    exchange: Exchange  # talks to the other ranks
    n_low: int = 0  # how many times in a row the gain was too low
    recent: Samples = field(default_factory=Samples)  # of this rank
    controls: Samples = field(default_factory=Samples)  # those of control steps

    def add(self, record: BatchRecord, *, is_cold: bool, is_control: bool) -> None:
        """Note a batch of the stable phase, or of a control step in it."""
        if not is_cold and self.now.settings.replan_every > 0:
            samples = self.controls if is_control else self.recent
            samples.add(record, is_cold=False)
            samples.keep_last(_MOST_BATCHES)

    def measure(self, measured: DurationBounds) -> DriftCheck | None:
        """Compare the batches since the last time with the plan; a collective call of all ranks.

        ``measured`` is as of :func:`check_drift`. Returns the same on every rank; None after a
        misread clock, or for too few batches.
        """
        if len(self.recent.warm) < _FEWEST_BATCHES:
            return None
        mine = [
            rank_batches([(phase, *each) for each in zip(s.warm, s.spans_ms, strict=True)])
            for phase, s in ((Phase.STABLE, self.recent), (Phase.CONTROL, self.controls))
        ]
        everyone = self.exchange.gather(mine)
        found: DriftCheck | None = None
        if everyone is not None and all(stable.batches for stable, _ in everyone):
            found = check_drift(self.now, measured, *zip(*everyone, strict=True))
        self.recent = Samples()
        if len(self.controls.warm) >= _FEWEST_BATCHES:  # fewer wait for others
            self.controls = Samples()
        agreed: DriftCheck | None = self.exchange.broadcast(found)
        if agreed is not None:
            self.n_low = self.n_low + 1 if self._is_low(agreed) else 0
        return agreed

    def why_not(self, found: DriftCheck) -> str | None:
        """Return why freezing does not pay, once this has lasted long enough."""
        if self.n_low < _LOW_IN_A_ROW:
            return None
        n_steps = self._steps_factor
        steps = f" for {n_steps:.2f} times the steps to a loss" if n_steps > 1.0 else ""
        return (
            f"the measured gain is {100 * found.gain:+.1f}% ({found.batch_ms:.1f} ms a batch, "
            f"{found.unfrozen_batch_ms:.1f} ms without freezing){steps}, under {key('min_gain')} "
            f"({self.now.settings.min_gain:g}) {self.n_low} times in a row"
        )

    def _is_low(self, found: DriftCheck) -> bool:
        n_steps, plan = self._steps_factor, self.now.plan
        # Further steps take what is outside of batches too.
        outside_ms = plan.outside_ms if plan is not None and n_steps > 1.0 else 0.0
        before_ms, now_ms = found.unfrozen_batch_ms + outside_ms, found.batch_ms + outside_ms
        # On a machine whose batches scatter much, a gain that may be there is not given up.
        at_most = before_ms * (1.0 + 2.0 * found.error)
        return at_most < (1.0 + self.now.settings.min_gain) * n_steps * now_ms

    @property
    def _steps_factor(self) -> float:
        """The factor of steps to make up for: that of a cap chosen by us."""
        is_chosen = self.now.settings.max_freeze_ratio == AUTO
        factor = None if self.now.plan is None else self.now.plan.steps_factor
        return (factor or 1.0) if is_chosen else 1.0


def drift_text(drift: Mapping[Group, float]) -> str:
    """Return a drift in words, the largest move first."""
    largest = sorted(drift.items(), key=lambda item: -abs(item[1] - 1.0))
    return ", ".join(
        f"{kind.value} of stage {stage} {100 * (factor - 1.0):+.1f}%"
        for (stage, kind), factor in largest[:4]
        if abs(factor - 1.0) >= 0.0005
    )


def described(plan: FreezePlan) -> str:
    """Return a plan's metrics, as log lines have them."""
    by_stage = plan.stage_mean_ratios()
    ratios = " ".join(f"{stage}:{ratio:.2f}" for stage, ratio in by_stage.items())
    whole = ", ".join(str(stage) for stage, ratio in by_stage.items() if ratio > 1.0 - 1e-9)
    return (
        f"batch {plan.unfrozen_batch_ms:.1f} ms unfrozen, {plan.batch_ms:.1f} ms planned "
        f"({100 * plan.gain:+.1f}% throughput), limit {plan.frozen_batch_ms:.1f} ms; mean ratios "
        f"{ratios}" + (f"; frozen for good under it: stage {whole}" if whole else "")
    )
