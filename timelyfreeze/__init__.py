"""TimelyFreeze: freeze parameters where it shortens the pipeline's critical path.

Implements arXiv:2602.05754. The planning pass is four pure steps to frozen values:
``parse_order`` (or another source of a ``ScheduleOrder``), ``build_dag``, ``bounds_from_samples``,
``solve_freeze_ratios``.
"""

from timelyfreeze.planning.lp import LpError, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios
from timelyfreeze.schedule.actions import Action, ActionKind, parse_action
from timelyfreeze.schedule.dag import PipelineDag, build_dag, critical_path, makespan, start_times
from timelyfreeze.schedule.order import (
    ScheduleError,
    ScheduleOrder,
    build_order,
    order_from_csv,
    order_to_csv,
    parse_order,
)
from timelyfreeze.timing.bounds import DurationBounds, bounds_from_samples, uniform_bounds

__all__ = [
    "Action",
    "ActionKind",
    "DurationBounds",
    "FreezePlan",
    "LpError",
    "PipelineDag",
    "ScheduleError",
    "ScheduleOrder",
    "bounds_from_samples",
    "build_dag",
    "build_order",
    "critical_path",
    "makespan",
    "order_from_csv",
    "order_to_csv",
    "parse_action",
    "parse_order",
    "plan_from_ratios",
    "solve_freeze_ratios",
    "start_times",
    "uniform_bounds",
]
