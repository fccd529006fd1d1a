"""TimelyFreeze: freeze parameters where it shortens the pipeline's critical path.

Implements arXiv:2602.05754. What this package exports is loaded when it is first asked for, so
importing it needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_ROOMS = {
    "schedule": (
        "Action", "ActionKind", "PipelineDag", "ScheduleError", "ScheduleOrder", "build_dag",
        "build_order", "critical_path", "makespan", "order_from_csv", "order_to_csv",
        "parse_action", "parse_order", "start_times",
    ),
    "timing": ("DurationBounds", "bounds_from_samples", "uniform_bounds"),
    "planning": ("FreezePlan", "LpError", "plan_from_ratios", "solve_freeze_ratios"),
}  # fmt: skip
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
