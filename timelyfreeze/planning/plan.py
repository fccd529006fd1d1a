"""Freeze plans: the frozen fractions of actions, and the expected batch time.

Notation: A actions.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from itertools import count
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.files import (
    MOST,
    Fraction,
    Milliseconds,
    Within,
    json_lines,
    parse_json,
    read_dataclass,
    to_plain,
)
from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds, simulate_batch, validate_bounds


@dataclass(frozen=True, eq=False)
class FreezePlan:
    """Expected freeze ratios r_i of arXiv:2602.05754, Eq. 4, and the resulting schedule.

    Attributes:
        actions: The A actions, in the order of the DAG the plan was made for.
        ratios: Fraction of the action's parameters to freeze, float64, shape [A], in [0, 1].
        durations_ms: Durations w_i under ``ratios``, shape [A], milliseconds.
        start_ms: Start times P_i under ``durations_ms``, shape [A], milliseconds.
        batch_ms: Batch time P_d under ``durations_ms``, milliseconds.
        unfrozen_batch_ms: Batch time with nothing frozen, milliseconds.
        frozen_batch_ms: Batch time with everything frozen, milliseconds; no plan is faster.
        steps_factor: Estimated steps to a loss over those without freezing; None if unknown.
        outside_ms: Time of a step beside its batches, per batch, milliseconds.
    """

    actions: tuple[Action, ...]
    ratios: NDArray[np.float64]
    durations_ms: NDArray[np.float64]
    start_ms: NDArray[np.float64]
    batch_ms: float
    unfrozen_batch_ms: float
    frozen_batch_ms: float
    steps_factor: float | None = None
    outside_ms: float = 0.0

    @cached_property
    def _ratio_by_action(self) -> Mapping[Action, float]:
        return dict(zip(self.actions, self.ratios.tolist(), strict=True))

    def ratio_of(self, action: Action) -> float:
        """Expected freeze ratio of ``action``, in [0, 1]; 0 if not freezable.

        Raises:
            ValueError: If the plan does not know the action.
        """
        try:
            return self._ratio_by_action[action]
        except KeyError:
            raise ValueError(
                f"action {action} is not in the plan, which has {len(self.actions)} actions from "
                f"{self.actions[0]} to {self.actions[-1]}; it was made for another schedule"
            ) from None

    def stage_mean_ratios(self) -> dict[int, float]:
        """Mean ratio over a stage's freezable actions; Eq. 8 counts forwards as well."""
        ratios: dict[int, list[float]] = {}
        for action, ratio in self._ratio_by_action.items():
            if action.kind.freezable:
                ratios.setdefault(action.stage, []).append(ratio)
        return {stage: math.fsum(ratios[stage]) / len(ratios[stage]) for stage in sorted(ratios)}

    @property
    def gain(self) -> float:
        """Throughput gained by this plan, as a fraction: 0.46 means 46% more batches per second."""
        return gain_of(self.unfrozen_batch_ms, self.batch_ms)

    @property
    def time_to_loss(self) -> float | None:
        """Estimated time to a loss over the time without freezing, ``outside_ms`` included."""
        unfrozen_ms = self.unfrozen_batch_ms + self.outside_ms
        if self.steps_factor is None or unfrozen_ms == 0.0:
            return None
        return (self.batch_ms + self.outside_ms) / unfrozen_ms * self.steps_factor

    @property
    def upper_bound_gain(self) -> float:
        """Throughput gained if everything were frozen: the most any plan can reach."""
        return gain_of(self.unfrozen_batch_ms, self.frozen_batch_ms)


def plan_from_ratios(
    dag: PipelineDag,
    bounds: DurationBounds,
    ratios: ArrayLike,
    *,
    n_processors: float | None = None,
    skips_grads: bool = False,
) -> FreezePlan:
    """Compute the batch under given freeze ratios: Eq. 4 solved for w_i, then Eq. 5.

    ``plan_from_ratios(dag, bounds, np.zeros(len(dag.actions)))`` is the plan without freezing.

    Args:
        dag: Precedence graph of A actions.
        bounds: Bounds of ``dag``.
        ratios: Shape [A], in [0, 1]; 0 where ``min_ms == max_ms``, as Eq. 4 defines it.
        n_processors: Number of ranks computing at once; None for a device per rank.
        skips_grads: Whether useless backwards are left out.

    Returns:
        FreezePlan: Consistent in itself: start and batch times follow from its durations.

    Raises:
        ValueError: If the bounds do not fit, the shape is not [A], or a ratio is outside of [0, 1]
            or is not 0 where freezing changes nothing.
    """
    validate_bounds(dag, bounds)
    r = np.array(ratios, dtype=np.float64)
    if r.shape != bounds.max_ms.shape:
        raise ValueError(
            f"ratios have shape {r.shape}; one is needed for each of the {len(dag.actions)} actions"
        )
    span = bounds.max_ms - bounds.min_ms
    bad = np.flatnonzero(~((r >= 0.0) & (r <= (span > 0.0))))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"action {dag.actions[i]} has freeze ratio {r[i]}; it must lie in [0, 1], and "
            f"be 0 where freezing saves nothing (here it saves {span[i]} ms)"
        )
    # In this form rounding makes no duration negative, and r = 1 gives min_ms to the last bit.
    durations = (1.0 - r) * bounds.max_ms + r * bounds.min_ms
    frozen = bounds.min_ms
    if skips_grads:
        nothing_ms = bounds.lead_ms(dag)  # what does nothing still waits for its message
        durations = np.where(skipped_actions(dag, skip_depths(dag, r)), nothing_ms, durations)
        everything = skip_depths(dag, dag.freezable & (span > 0.0))
        frozen = np.where(skipped_actions(dag, everything), nothing_ms, frozen)
    delays = bounds.delays_ms(dag)
    start, batch_ms = simulate_batch(dag, durations, n_processors, delays)
    for array in (r, durations, start):
        array.setflags(write=False)
    return FreezePlan(
        actions=dag.actions,
        ratios=r,
        durations_ms=durations,
        start_ms=start,
        batch_ms=batch_ms,
        unfrozen_batch_ms=simulate_batch(dag, bounds.max_ms, n_processors, delays)[1],
        frozen_batch_ms=simulate_batch(dag, frozen, n_processors, delays)[1],
        outside_ms=bounds.outside_ms,
    )


@dataclass(frozen=True)
class _Planned:
    """An action in a plan's file."""

    ratio: Fraction
    duration_ms: Milliseconds
    start_ms: Milliseconds


@dataclass(frozen=True)
class _PlanFile:
    """A plan, action by action; as in ``FreezePlan``."""

    batch_ms: Milliseconds
    unfrozen_batch_ms: Milliseconds
    frozen_batch_ms: Milliseconds
    outside_ms: Milliseconds
    steps_factor: Annotated[float, Within(1.0, MOST)] | None
    actions: Mapping[Action, _Planned]


def plan_to_json(plan: FreezePlan) -> str:
    """Write a plan as JSON, a line per action; undone exactly by ``plan_from_json``."""
    columns = (plan.ratios.tolist(), plan.durations_ms.tolist(), plan.start_ms.tolist())
    actions = dict(zip(plan.actions, map(_Planned, *columns), strict=True))
    head = {field.name: getattr(plan, field.name) for field in fields(_PlanFile)[:-1]}
    return json_lines(to_plain(_PlanFile(**head, actions=actions)), depth=2) + "\n"


def plan_from_json(text: str) -> FreezePlan:
    """Read a plan written by ``plan_to_json``, every number to the last bit.

    Raises:
        ValueError: If the text has another form; the message names the key and its value.
    """
    try:
        file = read_dataclass(_PlanFile, parse_json(text))
    except ValueError as error:
        raise ValueError(f"not the text of a freeze plan: {error}") from error
    rows = [astuple(row) for row in file.actions.values()]
    ratios, durations_ms, start_ms = np.array(rows, np.float64).reshape(-1, 3).T.copy()
    for array in (ratios, durations_ms, start_ms):
        array.setflags(write=False)
    head = {field.name: getattr(file, field.name) for field in fields(file)[:-1]}
    return FreezePlan(tuple(file.actions), ratios, durations_ms, start_ms, **head)


def gain_of(before_ms: float, after_ms: float) -> float:
    """Return the gain as a fraction; infinite if nothing is left to wait for."""
    return before_ms / after_ms - 1.0 if after_ms > 0.0 else math.inf


def skip_depths(dag: PipelineDag, ratios: ArrayLike) -> dict[int, int]:
    """Return how many leading stages are frozen whole, by microbatch, where any is."""
    whole = np.asarray(ratios, dtype=np.float64) == 1.0
    frozen = {
        (a.stage, a.microbatch) for a, is_whole in zip(dag.actions, whole, strict=True) if is_whole
    }
    return {
        microbatch: next(depth for depth in count(1) if (depth, microbatch) not in frozen)
        for microbatch in sorted(microbatch for stage, microbatch in frozen if stage == 0)
    }


def skipped_actions(dag: PipelineDag, depths: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return the actions left out under given skip depths, shape [A].

    Backwards of the leading stages, both halves of a split backward, but not of the first stage:
    without an input gradient to leave out, its bounds hold its time.
    """
    return np.array(
        [
            action.kind is not ActionKind.FORWARD
            and 0 < action.stage < depths.get(action.microbatch, 0)
            for action in dag.actions
        ],
        dtype=np.bool_,
    )
