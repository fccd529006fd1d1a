"""The phases of a run put to work: when to measure, when to plan, what to freeze now."""

from timelyfreeze.control.collected import CollectedMetrics, ObservedBatch
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.control.policy_checks import checks_for
from timelyfreeze.control.replica_states import (
    pipeline_error,
    rank_keys,
    saved_states,
    stages_of_ranks,
    state_of,
)
from timelyfreeze.control.state import FreezingState

__all__ = [
    "CollectedMetrics",
    "FreezeController",
    "FreezingState",
    "ObservedBatch",
    "checks_for",
    "pipeline_error",
    "rank_keys",
    "saved_states",
    "stages_of_ranks",
    "state_of",
]
