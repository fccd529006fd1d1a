"""The measured pipeline, made anew from the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timelyfreeze.schedule import build_dag
from timelyfreeze.timing import play_batch
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.times import bounds_from_times


@dataclass(frozen=True)
class Recall:
    """The measured pipeline as its bounds have it, and as times of stages have it.

    Attributes:
        measured_ms: Batch from the bounds, action by action, nothing frozen, milliseconds.
        from_stages_ms: Batch from the times of stages.
    """

    measured_ms: float
    from_stages_ms: float


def recall(file: BoundsFile, n_processors: float | None = None) -> Recall | None:
    """Compare what was measured with what times of stages make of it.

    Microbatches of a stage are taken to be alike, and stages to be those of ``stage_times``; this
    tells what that costs.

    Args:
        file: What was measured.
        n_processors: As for ``play_batch``.

    Returns:
        The two batch times without freezing, or None where the order is not beside the file.
    """
    if file.order is None:
        return None
    dag = build_dag(file.order)
    measured = np.array([file.bounds[action][1] for action in dag.actions])
    modelled = bounds_from_times(dag, file.stage_times()).max_ms + file.links.lead_ms(dag)
    delays = file.links.delays_ms(dag)
    return Recall(
        play_batch(dag, measured, n_processors, delays)[1],
        play_batch(dag, modelled, n_processors, delays)[1],
    )
