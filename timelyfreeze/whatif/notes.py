"""What a run notes beside its bounds: sizes, overheads and how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from timelyfreeze.files import Number, OneOf, Within, read_dataclass
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.whatif.loads import PartParameters
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes
from timelyfreeze.whatif.times import StageTimes


@dataclass(frozen=True)
class PipelineNotes:
    """What a bounds file says of its pipeline besides the bounds; None where it does not say."""

    schedule: str | None = None  # name of the schedule that was measured
    ranks: Number | None = None  # number of pipeline ranks
    # How many of them compute at once; times are then processor times. None if each has a device of
    # its own.
    processors: Annotated[float, Within(0.0, above=True)] | None = None
    first_stage: Annotated[str, OneOf(*FIRST_STAGE_MODES)] | None = None  # how it was frozen
    # What is done about input gradients that nobody needs.
    skip_input_grads: Annotated[str, OneOf(*SKIP_INPUT_GRADS)] | None = None
    # Number of layers of each stage.
    layers: tuple[Annotated[int, Within(0, 10**9)], ...] | None = None
    # Tokens of a microbatch, padding included; of ``unit``, if that is something else.
    tokens_per_microbatch: Number | None = None
    unit: Annotated[str, OneOf("tokens", "images")] | None = None  # what throughput counts
    # Times of each stage, in full and in split backwards.
    stages: tuple[StageTimes, ...] | None = None
    layer: StageTimes | None = None  # overhead of a layer
    fixed: StageTimes | None = None  # overhead of a stage without layers
    parameters: PartParameters | None = None  # parameters of the model's parts
    # Bytes of the model's parts, with the microbatches and types that were measured.
    memory: ModelBytes | BlockBytes | None = None


def parse_notes(where: str, plain: Any, n_stages: int) -> PipelineNotes:
    """Check notes that were read from JSON.

    Args:
        where: File and key, for messages.
        plain: What stands there.
        n_stages: Stages of the bounds beside.

    Raises:
        ValueError: If a key is unknown, or its value is none of this key's.
    """
    notes = read_dataclass(PipelineNotes, plain, where)
    for i, times in enumerate(notes.stages or ()):
        if errors := times.errors():
            raise ValueError(f"{where}.stages[{i}]: {'; '.join(errors)}")
    n_layers = None if notes.layers is None else sum(notes.layers)
    lengths: list[tuple[str, Sequence[Any] | None, int, str]] = [
        ("layers", notes.layers, n_stages, "stage"),
        ("stages", notes.stages, n_stages, "stage"),
    ]
    if notes.parameters is not None:
        each: Sequence[Any] = notes.parameters.layers
        lengths.append(("parameters.layers", each, n_layers or len(each) or 1, "layer"))
    if isinstance(notes.memory, BlockBytes):
        each, outputs = notes.memory.blocks, notes.memory.outputs
        n_blocks = len(each) if n_layers is None else n_layers
        lengths.append(("memory.blocks", each, n_blocks, "layer"))
        lengths.append(("memory.outputs", outputs, n_blocks + 1, "layer and the embedding"))
    for key, items, length, of in lengths:
        if items is not None and len(items) != length:
            raise ValueError(f"{where}.{key} must be a list of {length}, one for each {of}")
    return notes
