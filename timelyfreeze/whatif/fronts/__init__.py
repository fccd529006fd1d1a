"""What if the first layers were frozen for good: alone, cached, re-split, run ahead of, shrunk.

``times`` has what stages then take, ``cases`` plays the batches, ``shrink`` cuts a pipeline for
fewer ranks, ``report`` is what ``timelyfreeze plan --frozen-layers`` prints.
"""

from timelyfreeze.whatif.fronts.cases import (
    FrontAnswer,
    FrontCase,
    Shrunk,
    answer_fronts,
    front_times,
    frozen_layers,
    stages_in_front,
)

__all__ = [
    "FrontAnswer",
    "FrontCase",
    "Shrunk",
    "answer_fronts",
    "front_times",
    "frozen_layers",
    "stages_in_front",
]
