"""From times to freeze ratios: the linear program, its solvers, and the plan that comes out."""

from timelyfreeze.planning.background import (
    STOP_SIGNALS,
    AwaitedCall,
    BackgroundCall,
    BackgroundError,
    deaf_children,
    end_with_parent,
    start_python,
)
from timelyfreeze.planning.lp import LpError, solve_freeze_ratios
from timelyfreeze.planning.plan import (
    FreezePlan,
    plan_from_json,
    plan_from_ratios,
    plan_to_json,
    skip_depths,
)
from timelyfreeze.planning.program import FreezeLp, build_lp
from timelyfreeze.planning.solution import (
    RankTimes,
    Solution,
    SolverChoices,
    bounds_from_times,
    check_same_pipeline,
    chosen_plan,
    solution_from_plain,
    solution_to_plain,
    solve_from_bounds,
    solve_from_times,
)

__all__ = [
    "STOP_SIGNALS", "AwaitedCall", "BackgroundCall", "BackgroundError", "FreezeLp", "FreezePlan",
    "LpError", "RankTimes", "Solution", "SolverChoices", "bounds_from_times", "build_lp",
    "check_same_pipeline", "chosen_plan", "deaf_children", "end_with_parent", "plan_from_json",
    "plan_from_ratios", "plan_to_json", "skip_depths", "solution_from_plain", "solution_to_plain",
    "solve_freeze_ratios", "solve_from_bounds", "solve_from_times", "start_python",
]  # fmt: skip
