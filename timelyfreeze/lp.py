"""The linear program that turns duration bounds into freeze ratios.

Implements arXiv:2602.05754, Sec. 3.2.2: Eq. 6 under constraints [1] to [4]. Notation: A actions,
E edges, S stages, R freezable actions, K actions without successors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from timelyfreeze.bounds import DurationBounds, validate_bounds
from timelyfreeze.dag import PipelineDag
from timelyfreeze.plan import FreezePlan, plan_from_ratios
from timelyfreeze.processors import shared_processors

RATIO_KEY = "freezing.max_freeze_ratio"

# HiGHS's own feasibility and optimality tolerances, in units of the longest action (see build_lp).
# Its default of 1e-7 would let a path of a few hundred actions be wrong in the fifth digit.
_SOLVER_TOLERANCE = 1e-9
# Ratios this near 0 or 1 are 0 or 1. The solver places a vertex within its tolerance divided by
# the relative span of the action; a share of 1e-7 of a stage's elements is less than one tensor.
_RATIO_TOLERANCE = 1e-7
# How far P_d may exceed its optimum, relatively, while freezing is minimised. None is needed in
# exact arithmetic. Where durations span many decades, rounding can make the solver doubt its own
# optimum (these two statuses); it then gets a little room, instead of the run getting no plan.
_BATCH_TIME_SLACKS = (0.0, 1e-9, 1e-7)
_ROUNDING_STATUSES = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnknown)


class LpError(RuntimeError):
    """The solver stopped without an optimum.

    Attributes:
        status: The solver's own word for why, for example ``Time limit reached``.
    """

    def __init__(self, message: str, *, status: str) -> None:
        """Keep the status beside the message."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class FreezeLp:
    """The linear program as sparse arrays: minimise a cost over x, rows and columns bounded.

    Columns: start times P_i of the A actions, P_d, then ratios r_i of the R freezable actions.
    Rows: one per edge [1], one per last action (its edge to the destination), one per stage [4],
    and one for all work if ranks share processors.
    Times are divided by ``scale_ms``.

    Attributes:
        row_start: int32, shape [rows + 1]. Where each row begins in the next two.
        columns: int32. Column of each nonzero.
        values: float64. The nonzeros.
        row_lower: Shape [rows].
        row_upper: Shape [rows].
        column_lower: Shape [A + 1 + R].
        column_upper: Shape [A + 1 + R].
        freezable: int64, shape [R]. Action index of each ratio column.
        caps: Shape [S]. Upper bound of each stage's sum of ratios, the right side of [4].
        n_actions: A; also the column of P_d.
        n_edges: E.
        n_stages: S.
        scale_ms: Milliseconds per unit of time.
    """

    row_start: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    column_lower: NDArray[np.float64]
    column_upper: NDArray[np.float64]
    freezable: NDArray[np.int64]
    caps: NDArray[np.float64]
    n_actions: int
    n_edges: int
    n_stages: int
    scale_ms: float


def build_lp(
    dag: PipelineDag,
    bounds: DurationBounds,
    max_freeze_ratio: float | Sequence[float],
    n_processors: float | None = None,
) -> FreezeLp:
    """Write down Eq. 6 for a schedule, as sparse arrays and without solving it.

    With the durations replaced by w_i = w_i^max - r_i (w_i^max - w_i^min), constraint [2] becomes
    0 <= r_i <= 1, and [1] becomes P_j - P_i + r_i (w_i^max - w_i^min) >= w_i^max + d_ij, where d_ij
    is what a message from i to j takes. Constraint [4]
    counts a stage's freezable actions only, so ``max_freeze_ratio`` is what it says: a cap on
    their mean ratio. An action whose bounds are equal keeps r_i = 0 but still counts.

    Where ranks share ``n_processors``, one more row says that the batch cannot end before all work
    is done: n_processors * P_d >= sum of w_i over all actions.

    Times are measured in units of the longest action, so the program, and with it the ratios, do
    not depend on whether a run's actions last microseconds or minutes.

    Args:
        dag: Precedence graph of A actions.
        bounds: Bounds that fit ``dag``.
        max_freeze_ratio: Cap r_max on the mean ratio of each stage, in [0, 1]; one number, or one
            per stage.
        n_processors: How many ranks can compute at once; None if each has a device of its own.

    Returns:
        FreezeLp: E + K + S rows, and one more if ranks share processors; A + 1 + R columns.

    Raises:
        ValueError: If the bounds do not fit, all durations are 0, or a cap is not in [0, 1] or
            their number is not S.
    """
    validate_bounds(dag, bounds)
    caps = _check_caps(dag, max_freeze_ratio)
    scale = float(np.max(bounds.max_ms))
    if scale == 0.0:
        raise ValueError(
            "every action lasts 0 ms; there is nothing to plan; measure again with a later "
            "freezing.last_monitor_step"
        )
    n_actions, n_edges = len(dag.actions), len(dag.edges)
    longest = bounds.max_ms / scale
    span = longest - bounds.min_ms / scale
    freezable = np.flatnonzero(dag.freezable)
    ratio_column = np.full(n_actions, -1, dtype=np.int64)
    ratio_column[freezable] = n_actions + 1 + np.arange(len(freezable))

    # Precedence rows: every edge, then every last action to the destination, column n_actions.
    last = np.setdiff1d(np.arange(n_actions), dag.edges[:, 0])
    before = np.concatenate([dag.edges[:, 0], last])
    after = np.concatenate([dag.edges[:, 1], np.full(len(last), n_actions)])
    n_precedence = len(before)
    row = np.arange(n_precedence)
    shortened = np.flatnonzero(span[before] > 0.0)  # explicit zeros would only slow the solver
    parts = [
        (row, after, np.ones(n_precedence)),
        (row, before, -np.ones(n_precedence)),
        (row[shortened], ratio_column[before[shortened]], span[before[shortened]]),
        (n_precedence + dag.stages[freezable], ratio_column[freezable], np.ones(len(freezable))),
    ]
    n_rows = n_precedence + dag.n_stages
    shared = shared_processors(dag, n_processors)
    work: list[float] = []
    if shared is not None:
        parts += [
            (np.full(len(freezable), n_rows), ratio_column[freezable], span[freezable]),
            (np.array([n_rows]), np.array([n_actions]), np.array([shared])),
        ]
        work = [float(longest.sum())]
        n_rows += 1
    rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    by_row = np.argsort(rows, kind="stable")
    row_start = np.zeros(n_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=n_rows), out=row_start[1:])

    earliest = longest[before]
    earliest[:n_edges] += bounds.delays_ms(dag) / scale
    infinite = np.full(n_rows, np.inf)
    n_freezable = np.bincount(dag.stages[freezable], minlength=dag.n_stages)
    return FreezeLp(
        row_start=row_start,
        columns=columns[by_row].astype(np.int32),
        values=values[by_row],
        row_lower=np.concatenate([earliest, -infinite[: dag.n_stages], work]),
        row_upper=np.concatenate(
            [infinite[:n_precedence], caps * n_freezable, infinite[: len(work)]]
        ),
        column_lower=np.zeros(n_actions + 1 + len(freezable)),
        column_upper=np.concatenate(
            [np.full(n_actions + 1, np.inf), np.where(span[freezable] > 0.0, 1.0, 0.0)]
        ),
        freezable=freezable,
        caps=caps * n_freezable,
        n_actions=n_actions,
        n_edges=n_edges,
        n_stages=dag.n_stages,
        scale_ms=scale,
    )


def solve_freeze_ratios(
    dag: PipelineDag,
    bounds: DurationBounds,
    *,
    max_freeze_ratio: float | Sequence[float],
    whole_stages: Collection[int] = (),
    n_processors: float | None = None,
    time_limit_s: float = 60.0,
) -> FreezePlan:
    """Choose how much of each backward to freeze so that the batch ends soonest.

    Solves Eq. 6 of arXiv:2602.05754 under constraints [1] to [4]. Of all plans with the least
    batch time, one that freezes least is returned. The paper weighs the two goals by a small
    lambda; here they are solved one after the other, first P_d, then the sum of ratios with P_d
    held at its optimum, so that no weight has to be chosen against the solver's tolerance.

    Args:
        dag: Precedence graph of A actions.
        bounds: ``min_ms`` and ``max_ms``, shape [A], milliseconds.
        max_freeze_ratio: Cap r_max on the mean ratio of each stage's freezable actions, in [0, 1];
            one number, or one per stage.
        whole_stages: Stages of which an action is frozen whole or not at all. A fraction would be
            a probability there, and a batch whose actions are sometimes late is late more often
            than it is early; so their ratios are 0 or 1 and the promise is for every batch.
        n_processors: How many ranks can compute at once, for ranks that share the cores of a CPU;
            durations are then processor times. None if each rank has a device of its own.
        time_limit_s: Limit on the solver's time, seconds.

    Returns:
        FreezePlan: Ratios, and the durations, start times and batch time that follow from them.

    Raises:
        ValueError: As ``build_lp``, or if ``time_limit_s`` is not positive.
        LpError: If the solver stops short of an optimum; carries its status.

    Example:
        >>> from timelyfreeze import build_dag, parse_order, uniform_bounds
        >>> dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
        >>> bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
        >>> plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)
        >>> plan.batch_ms, [str(a) for a, r in zip(dag.actions, plan.ratios) if r > 0.5]
        (7.0, ['0B1', '1B0'])
    """
    if not time_limit_s > 0.0:
        raise ValueError(f"time_limit_s is {time_limit_s}; it must be positive")
    lp = build_lp(dag, bounds, max_freeze_ratio, n_processors)
    raw = _solve(lp, time_limit_s)
    undecided = [
        i
        for i in np.flatnonzero((raw > _RATIO_TOLERANCE) & (raw < 1.0 - _RATIO_TOLERANCE)).tolist()
        if dag.stages[lp.freezable[i]] in whole_stages
    ]
    if undecided:
        raw = _solve(_decide(lp, dag, raw, whole_stages), time_limit_s)
    violation = float(max(-raw.min(initial=0.0), raw.max(initial=0.0) - 1.0))
    assert violation < 1e-6, f"HiGHS calls a ratio optimal that breaks its bounds by {violation}"
    ratios = np.zeros(lp.n_actions)
    ratios[lp.freezable] = np.where(
        raw < _RATIO_TOLERANCE, 0.0, np.where(raw > 1.0 - _RATIO_TOLERANCE, 1.0, raw)
    )
    plan = plan_from_ratios(dag, bounds, ratios, n_processors=n_processors)
    for i in lp.freezable[undecided]:
        without = np.where(np.arange(lp.n_actions) == i, 0.0, plan.ratios)
        other = plan_from_ratios(dag, bounds, without, n_processors=n_processors)
        if other.batch_ms <= plan.batch_ms:
            plan = other
    return plan


def _check_caps(dag: PipelineDag, max_freeze_ratio: float | Sequence[float]) -> NDArray[np.float64]:
    caps = np.asarray(max_freeze_ratio, dtype=np.float64)
    if caps.shape not in ((), (dag.n_stages,)):
        raise ValueError(
            f"{RATIO_KEY} has shape {caps.shape}; it must be one number, or one for each of the "
            f"{dag.n_stages} stages"
        )
    outside = caps[~((caps >= 0.0) & (caps <= 1.0))]
    if outside.size:
        raise ValueError(f"{RATIO_KEY} is {float(outside[0])}; it must lie in [0, 1]")
    return np.broadcast_to(caps, (dag.n_stages,))


def _decide(
    lp: FreezeLp, dag: PipelineDag, raw: NDArray[np.float64], whole_stages: Collection[int]
) -> FreezeLp:
    """Fix the ratios of ``whole_stages`` at 0 or 1: 1 where above 0, as far as the cap allows.

    The highest come first. Freezing more never makes a batch longer, so only a cap can make the
    batch time rise.
    """
    lower, upper = lp.column_lower.copy(), lp.column_upper.copy()
    for stage in whole_stages:
        of_stage = np.flatnonzero(dag.stages[lp.freezable] == stage)
        ratios = raw[of_stage]
        n_frozen = min(
            int((ratios > _RATIO_TOLERANCE).sum()), int(lp.caps[stage] + _RATIO_TOLERANCE)
        )
        values = np.zeros(len(of_stage))
        values[np.argsort(-ratios, kind="stable")[:n_frozen]] = 1.0
        columns = lp.n_actions + 1 + of_stage
        lower[columns] = upper[columns] = values
    return replace(lp, column_lower=lower, column_upper=upper)


def _solve(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    """Minimise P_d, then the sum of ratios at that P_d; return the R ratios."""
    n_columns = len(lp.column_lower)
    solver = _load(lp, time_limit_s)
    cost = np.zeros(n_columns)
    cost[lp.n_actions] = 1.0
    _set_cost(solver, cost)
    _run(solver, lp, "least batch time")

    # P_d is held at the value just found: the first solution is feasible for the second program,
    # which starts from its basis.
    best = float(solver.getInfo().objective_function_value)
    cost[lp.n_actions] = 0.0
    cost[lp.n_actions + 1 :] = 1.0
    _set_cost(solver, cost)
    for slack in _BATCH_TIME_SLACKS:
        solver.changeColBounds(lp.n_actions, 0.0, best * (1.0 + slack))
        try:
            _run(solver, lp, "least freezing")
            break
        except LpError:
            retry = solver.getModelStatus() in _ROUNDING_STATUSES
            if not retry or slack == _BATCH_TIME_SLACKS[-1]:
                raise
    solution = np.array(solver.getSolution().col_value, dtype=np.float64)
    return solution[lp.n_actions + 1 :]


def _load(lp: FreezeLp, time_limit_s: float) -> highspy.Highs:
    """Hand the program to a new solver, without a cost yet."""
    solver = highspy.Highs()
    for option, value in {
        "output_flag": False,
        "threads": 1,
        "time_limit": time_limit_s,
        "primal_feasibility_tolerance": _SOLVER_TOLERANCE,
        "dual_feasibility_tolerance": _SOLVER_TOLERANCE,
    }.items():
        solver.setOptionValue(option, value)
    model = highspy.HighsLp()
    model.num_col_ = len(lp.column_lower)
    model.num_row_ = len(lp.row_lower)
    model.col_cost_ = np.zeros(len(lp.column_lower))
    model.col_lower_, model.col_upper_ = lp.column_lower, lp.column_upper
    model.row_lower_, model.row_upper_ = lp.row_lower, lp.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = lp.row_start
    model.a_matrix_.index_ = lp.columns
    model.a_matrix_.value_ = lp.values
    solver.passModel(model)
    return solver


def _set_cost(solver: highspy.Highs, cost: NDArray[np.float64]) -> None:
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)


def _run(solver: highspy.Highs, lp: FreezeLp, goal: str) -> None:
    solver.run()
    model_status = solver.getModelStatus()
    if model_status != highspy.HighsModelStatus.kOptimal:
        status = str(solver.modelStatusToString(model_status))
        raise LpError(
            f"the freeze-ratio program ({goal}) ended with status {status!r} instead of an "
            f"optimum; it has A={lp.n_actions} actions, E={lp.n_edges} edges, S={lp.n_stages} "
            "stages",
            status=status,
        )
