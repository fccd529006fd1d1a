"""Moves of an elastic run from one pipeline to another: ``moves.csv``."""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.files import Count, Number, Seconds, Table


@dataclass(frozen=True)
class Move:
    """One move; a run that has made none has no file.

    Attributes:
        step: First optimizer step in the new pipeline.
        frozen_layers: Layers of the front that were frozen then.
        ranks: Ranks of the new pipeline.
        replicas: Copies of it that share each batch of the run.
        split: Layers on each of its ranks, such as ``"8 2"``.
        seconds: What the move took: saving, building, loading. No step time has it.
    """

    step: Number
    frozen_layers: Count
    ranks: Number
    replicas: Number
    split: str
    seconds: Seconds


MOVES = Table("moves.csv", Move)
