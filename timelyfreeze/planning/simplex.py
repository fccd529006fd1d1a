"""The program solved to a vertex by HiGHS' simplex method: exact, and fast for small pipelines."""

import highspy
import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import FreezeLp, LpError

# HiGHS's own feasibility and optimality tolerances, in units of the longest action (see build_lp).
# Its default of 1e-7 would let a path of a few hundred actions be wrong in the fifth digit.
_SOLVER_TOLERANCE = 1e-9
# How far P_d may exceed its optimum, relatively, while freezing is minimised. None is needed in
# exact arithmetic. Where durations span many decades, rounding can make the solver doubt its own
# optimum (these two statuses); it then gets a little room, instead of the run getting no plan.
_BATCH_TIME_SLACKS = (0.0, 1e-9, 1e-7)
_ROUNDING_STATUSES = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnknown)


def solve_by_simplex(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    """Minimise P_d, then the sum of ratios under this P_d; return the R ratios."""
    solver = load(lp, time_limit_s)
    cost = np.zeros(len(lp.column_lower))
    cost[lp.n_actions] = 1.0
    minimise(solver, lp, cost, "least batch time")

    # P_d is held at the value just found: the first solution is feasible for the second program,
    # which starts from its basis.
    best = float(solver.getInfo().objective_function_value)
    cost[lp.n_actions] = 0.0
    cost[lp.n_actions + 1 :] = 1.0
    for slack in _BATCH_TIME_SLACKS:
        solver.changeColBounds(lp.n_actions, 0.0, best * (1.0 + slack))
        try:
            minimise(solver, lp, cost, "least freezing")
            break
        except LpError:
            retry = solver.getModelStatus() in _ROUNDING_STATUSES
            if not retry or slack == _BATCH_TIME_SLACKS[-1]:
                raise
    solution = np.array(solver.getSolution().col_value, dtype=np.float64)
    return solution[lp.n_actions + 1 :]


def load(lp: FreezeLp, time_limit_s: float) -> highspy.Highs:
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


def minimise(solver: highspy.Highs, lp: FreezeLp, cost: NDArray[np.float64], goal: str) -> None:
    """Minimise a cost of the columns; ``goal`` names the cost in errors."""
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    solver.run()
    model_status = solver.getModelStatus()
    if model_status != highspy.HighsModelStatus.kOptimal:
        status = str(solver.modelStatusToString(model_status))
        raise lp.stopped(goal, status, "short of an optimum")
