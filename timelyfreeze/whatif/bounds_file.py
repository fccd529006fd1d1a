"""Bounds files and their metadata, read without their schedule.

A training run and the profile save the same files: ``bounds.json``, and ``schedule.csv`` beside it.
The bounds file may have a further entry, ``pipeline``: sizes, overheads and the way of measuring.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from timelyfreeze.files import Number, OneOf, Within, read_dataclass, read_object, to_plain
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
)
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.timing import DurationBounds, bounds_to_json, parse_bounds, simulate_batch
from timelyfreeze.timing.bounds import BoundsTable
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel, block_times, layer_model
from timelyfreeze.whatif.partition import PartParameters
from timelyfreeze.whatif.rank_memory import ModelBytes
from timelyfreeze.whatif.times import (
    Links,
    Pair,
    StageTimes,
    complete_times,
    median_pairs,
    unfrozen_batch_ms,
)


@dataclass(frozen=True)
class PipelineMetadata:
    """A pipeline's metadata in a bounds file; None for missing values."""

    schedule: str | None = None  # name of the schedule that was measured
    ranks: Number | None = None  # number of pipeline ranks
    # How many of them compute at once; times are then processor times. None if each has a device of
    # its own.
    processors: Annotated[float, Within(0.0, above=True)] | None = None
    first_stage: Annotated[str, OneOf(*FIRST_STAGE_MODES)] | None = None  # how it was frozen
    # Directions in which frozen weights still learn.
    gradient_rank: Annotated[int, Within(0, 10**9)] | None = None
    # What is done about input gradients that nobody needs.
    skip_input_grads: Annotated[str, OneOf(*SKIP_INPUT_GRADS)] | None = None
    # number of layers of each stage
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
    memory: ModelBytes | None = None


PIPELINE = "pipeline"
ORDER_FILE = "schedule.csv"


def _parse_metadata(plain: Any, n_stages: int) -> PipelineMetadata:
    metadata = read_dataclass(PipelineMetadata, plain, PIPELINE)
    for i, times in enumerate(metadata.stages or ()):
        if errors := times.errors():
            raise ValueError(f"{PIPELINE}.stages[{i}]: {'; '.join(errors)}")
    n_layers = None if metadata.layers is None else sum(metadata.layers)
    lengths: list[tuple[str, Sequence[Any] | None, int, str]] = [
        ("layers", metadata.layers, n_stages, "stage"),
        ("stages", metadata.stages, n_stages, "stage"),
    ]
    if metadata.parameters is not None:
        each: Sequence[Any] = metadata.parameters.layers
        lengths.append(("parameters.layers", each, n_layers or len(each) or 1, "layer"))
    if metadata.memory is not None and (metadata.memory.blocks or metadata.memory.outputs):
        each, outputs = metadata.memory.blocks, metadata.memory.outputs
        n_blocks = len(each) if n_layers is None else n_layers
        lengths.append(("memory.blocks", each, n_blocks, "layer"))
        lengths.append(("memory.outputs", outputs, n_blocks + 1, "layer and the embedding"))
    for key, items, length, of in lengths:
        if items is not None and len(items) != length:
            raise ValueError(f"{PIPELINE}.{key} must be a list of {length}, one for each {of}")
    return metadata


@dataclass(frozen=True)
class BoundsFile:
    """A bounds file with the order beside."""

    path: Path  # where it was read from
    table: BoundsTable  # what it says of actions, messages and the run
    metadata: PipelineMetadata  # what else it says
    order: ScheduleOrder | None  # the order it belongs to, if that lies beside it
    n_stages: int  # number of stages
    n_microbatches: int  # number of microbatches
    notes: tuple[str, ...] = ()  # what its values rest on

    @property
    def links(self) -> Links:
        """Costs of messages: their overhead, part of the bounds, and their latency."""
        latency_ms = {(a, b): ms for (a, b), ms in self.table.p2p_latency_ms.items()}
        return Links(self.table.p2p_overhead_ms, latency_ms)

    @property
    def n_ranks(self) -> int | None:
        """Number of pipeline ranks, if file or order tells."""
        return self.metadata.ranks if self.order is None else self.order.n_ranks

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Return the noted times of stages, else medians over microbatches without messages."""
        if self.metadata.stages is not None:
            return self.metadata.stages
        bounds = self.table.bounds if self.keeps_overhead else _without_overhead(self)
        return tuple(
            complete_times(median_pairs(bounds, stage), is_first=stage == 0)
            for stage in range(self.n_stages)
        )

    def model(self, layers: Split, parameters: PartParameters | None) -> LayerModel | BlockTimes:
        """Return stage times under moved layers; ``parameters`` tell if layers differ.

        ``layers`` are those of the measured stages.
        """
        stages = self.stage_times()
        if parameters is not None and not parameters.are_alike:
            return block_times(stages, layers)
        return layer_model(stages, layers, self.metadata.layer, self.metadata.fixed)

    def measured(self, dag: PipelineDag) -> DurationBounds:
        """Return the bounds as the run had them, whose pipeline ``dag`` is."""
        pairs = np.array([self.table.bounds[action] for action in dag.actions])
        return DurationBounds(pairs[:, 0], pairs[:, 1], **asdict(self.links))

    @property
    def keeps_overhead(self) -> bool:
        """Whether actions with a message's overhead are unknown."""
        return self.table.p2p_overhead_ms > 0.0 and self.order is None

    @property
    def derived_kinds(self) -> str:
        """Actions whose times were not measured but follow from others, such as "I and W"."""
        if self.metadata.stages is not None:
            return ""
        kinds = {action.kind for action in self.table.bounds}
        if ActionKind.FULL_BACKWARD not in kinds:
            return "B"
        return "" if ActionKind.WEIGHT_BACKWARD in kinds else "I and W"


def bounds_file_text(dag: PipelineDag, bounds: DurationBounds, metadata: PipelineMetadata) -> str:
    """Write bounds of ``dag``, and metadata, as JSON for ``bounds_from_json``."""
    return bounds_to_json(dag, bounds, {PIPELINE: to_plain(metadata)})


def read_bounds_file(path: Path) -> BoundsFile:
    """Read a bounds file, its metadata, and the order beside, if any."""
    try:
        data = read_object(path)
        if not isinstance(data.get("bounds"), dict):
            raise ValueError(
                'no bounds file, for it has no object "bounds"; a run saves one as bounds.json'
            )
        table = parse_bounds(data)
        bounds = table.bounds
        if not bounds:
            raise ValueError("bounds is empty")
        n_stages = 1 + max(action.stage for action in bounds)
        n_microbatches = 1 + max(action.microbatch for action in bounds)
        _check_bounds(bounds, n_stages, n_microbatches)
        metadata = _parse_metadata(data.get(PIPELINE, {}), n_stages)
    except OSError as error:
        who = "a run with a plan writes it, and timelyfreeze profile does"
        raise ValueError(f"{path} cannot be read: {error.strerror}; {who}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    order = _order_beside(path, bounds)
    if (ranks := metadata.ranks) is not None:
        wanted = n_stages % ranks if order is None else ranks - order.n_ranks
        if wanted != 0:
            of = f"{n_stages} stages" if order is None else f"{order.n_ranks} in {ORDER_FILE}"
            raise ValueError(f"{path}: {PIPELINE}.ranks is {ranks}, which does not fit {of}")
    file = BoundsFile(path, table, metadata, order, n_stages, n_microbatches)
    if not file.keeps_overhead:
        _without_overhead(file)
    return file


def _without_overhead(file: BoundsFile) -> dict[Action, Pair]:
    """Return the bounds without the overhead of messages, up to rounding errors."""
    overhead_ms = file.table.p2p_overhead_ms
    found: dict[Action, Pair] = dict(file.table.bounds)
    if file.order is None or overhead_ms == 0.0:
        return found
    dag = build_dag(file.order)
    for i in np.flatnonzero(dag.receiving).tolist():
        action = dag.actions[i]
        low, high = found[action]
        if low < overhead_ms * (1.0 - 1e-9):
            raise ValueError(
                f"{file.path}: bounds.{action}.min_ms is {low}, less than the overhead of the "
                f"message in it (p2p_overhead_ms, {overhead_ms})"
            )
        found[action] = (max(low - overhead_ms, 0.0), max(high - overhead_ms, 0.0))
    return found


def _check_bounds(bounds: Mapping[Action, Pair], n_stages: int, n_microbatches: int) -> None:
    for action, (low, high) in bounds.items():
        if low > high:
            raise ValueError(f"bounds.{action}: min_ms {low} is above max_ms {high}")
        if low < high and not action.kind.freezable:
            raise ValueError(
                f"bounds.{action}: min_ms {low} and max_ms {high} differ; {action.kind.value} "
                "computes no weight gradient, so both must be equal"
            )
    for stage, microbatch in itertools.product(range(n_stages), range(n_microbatches)):
        forward, full, inputs, weights = (Action(stage, k, microbatch) for k in ActionKind)
        if forward not in bounds:
            raise ValueError(f"bounds has no {forward}")
        if (inputs in bounds) != (weights in bounds) or (full in bounds) == (inputs in bounds):
            raise ValueError(f"bounds must have either {full} or both {inputs} and {weights}")


def _order_beside(path: Path, bounds: Mapping[Action, Pair]) -> ScheduleOrder | None:
    beside = path.parent / ORDER_FILE
    if not beside.is_file():
        return None
    try:
        order = order_from_csv(beside.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{beside}: {error}") from error
    odd = sorted(map(str, {action for row in order.ranks for action in row} ^ set(bounds)))
    if odd:
        raise ValueError(
            f"{path} and {beside.name} beside it do not have the same actions: {odd[0]} is in only "
            f"one of them ({len(odd)} such actions); keep the two files of one run together"
        )
    return order


def recall(file: BoundsFile) -> tuple[float, float] | None:
    """Return the unfrozen batch by its bounds, and by times of stages; None without its order."""
    if file.order is None:
        return None
    dag = build_dag(file.order)
    bounds, n_processors = file.measured(dag), file.metadata.processors
    _, batch_ms = simulate_batch(dag, bounds.max_ms, n_processors, bounds.delays_ms(dag))
    return batch_ms, unfrozen_batch_ms(dag, file.stage_times(), n_processors, file.links)
