"""From times to freeze ratios: the linear program, its solvers, and the plan that comes out."""

from timelyfreeze.planning.background import (
    STOP_SIGNALS,
    AwaitedCall,
    BackgroundCall,
    BackgroundError,
    deaf_children,
    end_with_parent,
    heeded_signals,
    start_python,
)
from timelyfreeze.planning.lp import LpError, solve_freeze_ratios
from timelyfreeze.planning.measured import RankTimes
from timelyfreeze.planning.plan import (
    FreezePlan,
    gain_of,
    plan_from_json,
    plan_from_ratios,
    plan_to_json,
    skip_depths,
)
from timelyfreeze.planning.solution import (
    Solution,
    SolverChoices,
    check_same_pipeline,
    chosen_plan,
    factor_of_means,
    solution_from_plain,
    solution_to_plain,
    solve_from_bounds,
    solve_from_times,
    steps_error,
)
