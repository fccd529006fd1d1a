"""The phases of a run put to work: when to measure, when to plan, what to freeze now."""

from timelyfreeze.control.build import attach_clocks, build_controller, processors_of
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.control.emulated import (
    EmulatedBatch,
    EmulatedRecorder,
    EmulatedState,
    merge_ranks,
)
from timelyfreeze.control.report import FreezeReport, Reporter
from timelyfreeze.control.state import (
    FreezingState,
    pipeline_error,
    rank_keys,
    saved_states,
)
