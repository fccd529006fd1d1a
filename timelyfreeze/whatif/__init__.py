"""What if: one bounds file, and the batch under other schedules, caps, microbatches and splits.

Times of stages and messages (``times``) come out of a bounds file (``bounds_file``, ``notes``), are
carried over to other splits (``layer_model``) and given to the actions of other schedules. Every
case of a ``grid`` is solved as a run would solve it (``answers``, ``schedule_cases``), beside the
best split without freezing (``best_unfrozen``). ``report`` is what ``timelyfreeze plan`` prints.
"""

from timelyfreeze.whatif.answers import answer
from timelyfreeze.whatif.bounds_file import (
    BoundsFile,
    PipelineNotes,
    bounds_file_text,
    read_bounds_file,
)
from timelyfreeze.whatif.grid import Answer, Case, Grid, Split, render_cap, render_split
from timelyfreeze.whatif.layer_model import layer_overheads
from timelyfreeze.whatif.times import Pair, StageTimes, complete_times

__all__ = [
    "Answer",
    "BoundsFile",
    "Case",
    "Grid",
    "Pair",
    "PipelineNotes",
    "Split",
    "StageTimes",
    "answer",
    "bounds_file_text",
    "complete_times",
    "layer_overheads",
    "read_bounds_file",
    "render_cap",
    "render_split",
]
