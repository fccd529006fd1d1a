"""TimelyFreeze: freeze parameters where it shortens the pipeline's critical path.

Implements arXiv:2602.05754. Names load at first use, so importing the package needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timelyfreeze.api import TimelyFreeze as TimelyFreeze
    from timelyfreeze.control import FreezeReport as FreezeReport
    from timelyfreeze.front.caching import CacheUse as CacheUse
    from timelyfreeze.front.caching import Row as Row
    from timelyfreeze.front.caching import token_digest as token_digest
    from timelyfreeze.model_cut import partition_model as partition_model
    from timelyfreeze.planning import FreezePlan as FreezePlan
    from timelyfreeze.planning import LpError as LpError
    from timelyfreeze.planning import plan_from_ratios as plan_from_ratios
    from timelyfreeze.planning import solve_freeze_ratios as solve_freeze_ratios
    from timelyfreeze.policies import Check as Check
    from timelyfreeze.policies import Decision as Decision
    from timelyfreeze.policies import FreezePolicy as FreezePolicy
    from timelyfreeze.policies import Measurement as Measurement
    from timelyfreeze.policies import Metric as Metric
    from timelyfreeze.policies import ModelLayout as ModelLayout
    from timelyfreeze.policies import Source as Source
    from timelyfreeze.policies import register_policy as register_policy
    from timelyfreeze.policies import registered_policies as registered_policies
    from timelyfreeze.schedule import Action as Action
    from timelyfreeze.schedule import ActionKind as ActionKind
    from timelyfreeze.schedule import PipelineDag as PipelineDag
    from timelyfreeze.schedule import ScheduleError as ScheduleError
    from timelyfreeze.schedule import ScheduleOrder as ScheduleOrder
    from timelyfreeze.schedule import build_dag as build_dag
    from timelyfreeze.schedule import build_order as build_order
    from timelyfreeze.schedule import makespan as makespan
    from timelyfreeze.schedule import order_from_csv as order_from_csv
    from timelyfreeze.schedule import order_to_csv as order_to_csv
    from timelyfreeze.schedule import parse_action as parse_action
    from timelyfreeze.schedule import parse_order as parse_order
    from timelyfreeze.schedule import start_times as start_times
    from timelyfreeze.settings import ActivationCache as ActivationCache
    from timelyfreeze.settings import FreezeSettings as FreezeSettings
    from timelyfreeze.settings import Phase as Phase
    from timelyfreeze.timing import DurationBounds as DurationBounds
    from timelyfreeze.timing import bounds_from_samples as bounds_from_samples
    from timelyfreeze.timing import uniform_bounds as uniform_bounds

_ROOMS = {
    "api": ("TimelyFreeze",),
    "control": ("FreezeReport",),
    "front.caching": ("CacheUse", "Row", "token_digest"),
    "model_cut": ("partition_model",),
    "planning": ("FreezePlan", "LpError", "plan_from_ratios", "solve_freeze_ratios"),
    "policies": (
        "Check", "Decision", "FreezePolicy", "Measurement", "Metric", "ModelLayout", "Source",
        "register_policy", "registered_policies",
    ),
    "schedule": (
        "Action", "ActionKind", "PipelineDag", "ScheduleError", "ScheduleOrder", "build_dag",
        "build_order", "makespan", "order_from_csv", "order_to_csv",
        "parse_action", "parse_order", "start_times",
    ),
    "settings": ("ActivationCache", "FreezeSettings", "Phase"),
    "timing": ("DurationBounds", "bounds_from_samples", "uniform_bounds"),
}  # fmt: skip
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
