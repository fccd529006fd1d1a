"""Bounds files, read without the schedule they belong to.

A training run and the profile save the same files: ``bounds.json``, and ``schedule.csv`` beside it.
The bounds file may have one more entry, ``pipeline`` (``notes``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from timelyfreeze.files import (
    keys_of,
    listed,
    number_of,
    parse_json,
    read_dataclass,
    shown,
    whole_of,
)
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
)
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.timing import DurationBounds, bounds_to_json, parse_bounds, play_batch, receiving
from timelyfreeze.whatif.loads import PartParameters
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes
from timelyfreeze.whatif.times import (
    Links,
    Pair,
    StageTimes,
    bounds_from_times,
    complete_times,
    median_pairs,
)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PipelineNotes:
    """What a bounds file says of its pipeline besides the bounds; None where it does not say."""

    schedule: str | None = None  # name of the schedule that was measured
    ranks: int | None = None  # number of pipeline ranks
    # How many of them compute at once; times are then processor times. None if each has a device of
    # its own.
    processors: float | None = None
    # How the first stage was frozen: one of ``settings.FIRST_STAGE_MODES``.
    first_stage: str | None = None
    # What is done about input gradients that nobody needs: one of ``settings.SKIP_INPUT_GRADS``.
    skip_input_grads: str | None = None
    layers: tuple[int, ...] | None = None  # number of layers of each stage
    # Tokens of a microbatch, padding included; of ``unit``, if that is something else.
    tokens_per_microbatch: int | None = None
    unit: str | None = None  # what throughput counts: "tokens" or "images"
    # Times of each stage, in full and in split backwards.
    stages: tuple[StageTimes, ...] | None = None
    layer: StageTimes | None = None  # overhead of a layer
    fixed: StageTimes | None = None  # overhead of a stage without layers
    parameters: PartParameters | None = None  # parameters of the model's parts
    # Bytes of the model's parts, with the microbatches and types that were measured.
    memory: ModelBytes | None = None


def notes_to_json(notes: PipelineNotes) -> str:
    """Return notes as a JSON object, a line for each key that is known."""
    plain = {key: value for key, value in asdict(notes).items() if value is not None}
    rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(plain[key])}" for key in plain)
    return f"{{\n{rows}\n  }}"


def parse_notes(where: str, plain: Any, n_stages: int) -> PipelineNotes:
    """Check notes that were read from JSON.

    Args:
        where: File and key, for messages.
        plain: What stands there.
        n_stages: Stages of the bounds beside.

    Raises:
        ValueError: If a key is unknown, or its value is none of this key's.
    """

    def each(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
        return lambda place, value: tuple(
            parse(f"{place}[{i}]", one) for i, one in enumerate(_list(place, value, n_stages))
        )

    given = set(keys_of(where, plain))
    split = plain.get("layers")
    readers: dict[str, Callable[[str, Any], Any]] = {
        "schedule": _word,
        "ranks": _count,
        "processors": _positive,
        "first_stage": partial(_word, known=FIRST_STAGE_MODES),
        "skip_input_grads": partial(_word, known=SKIP_INPUT_GRADS),
        "layers": each(whole_of),
        "tokens_per_microbatch": _count,
        "unit": partial(_word, known=("tokens", "images")),
        "stages": each(_times),
        "layer": _overheads,
        "fixed": _overheads,
        "parameters": partial(_parameters, split),
        "memory": partial(_memory, split),
    }
    if unknown := sorted(given - set(readers)):
        raise ValueError(f"{where} has unknown keys: {listed(unknown)}; a newer version wrote it")
    known = [key for key in readers if plain.get(key) is not None]
    return PipelineNotes(**{key: readers[key](f"{where}.{key}", plain[key]) for key in known})


def _word(where: str, value: Any, known: tuple[str, ...] | None = None) -> str:
    if not isinstance(value, str) or not (value in known if known else value.isprintable()):
        words = ", ".join(known or ("any printable word",))
        raise ValueError(f"{where} is {shown(value)}; known: {words}")
    return value


_MOST = 10**15
_count = partial(whole_of, least=1, most=_MOST)


def _positive(where: str, value: Any) -> float:
    number = number_of(where, value, least=0.0)
    if number == 0.0:
        raise ValueError(f"{where} is {shown(value)}; it must be above 0")
    return number


def _sizes(kind: type[_Value], where: str, plain: dict[str, Any]) -> _Value:
    """Read numbers of parameters or bytes, also of parts, none of them below 0."""

    def check(where: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                check(f"{where}.{key}", one)
        elif isinstance(value, list):
            for i, one in enumerate(value):
                check(f"{where}[{i}]", one)
        else:
            whole_of(where, value, most=_MOST)

    found = read_dataclass(kind, plain, where)
    check(where, plain)
    return found


def _parameters(split: Any, where: str, value: Any) -> PartParameters:
    """Read numbers of parameters; files of former releases have one number for all layers."""
    plain = {key: value[key] for key in keys_of(where, value)}
    if split is not None and "layer" in plain:
        layer = whole_of(f"{where}.layer", plain.pop("layer"), most=_MOST)
        plain["layers"] = [layer] * sum(split)
    found = _sizes(PartParameters, where, plain)
    if not found.layers or len(found.layers) != sum(split or [len(found.layers)]):
        raise ValueError(f"{where}.layers must be a list with a number for each layer")
    return found


def _memory(split: Any, where: str, value: Any) -> ModelBytes:
    """Read bytes of parts; of a model whose layers differ, of each layer."""
    plain = {key: value[key] for key in keys_of(where, value)}
    if "blocks" not in plain:
        return _sizes(ModelBytes, where, plain)
    each = plain["blocks"]
    n_layers = sum(split) if split is not None else len(each) if isinstance(each, list) else 0
    _list(f"{where}.blocks", each, n_layers, "layer")
    _list(f"{where}.outputs", plain.get("outputs"), n_layers + 1, "layer and the embedding")
    return _sizes(BlockBytes, where, plain)


def _list(where: str, value: Any, length: int, of: str = "stage") -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{where} must be a list of {length}, one for each {of}")
    return value


def _overheads(where: str, value: Any) -> StageTimes:
    """Read six numbers, which may be below 0: overheads are differences of times."""
    names = [field.name for field in fields(StageTimes)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{where} must have the keys {', '.join(names)}")
    return StageTimes(**{name: number_of(f"{where}.{name}", value[name]) for name in names})


def _times(where: str, value: Any) -> StageTimes:
    times = _overheads(where, value)
    if errors := times.errors():
        raise ValueError(f"{where}: {'; '.join(errors)}")
    return times


PIPELINE = "pipeline"
ORDER_FILE = "schedule.csv"
_END = "\n}\n"


@dataclass(frozen=True)
class BoundsFile:
    """A bounds file with the order that lies beside it."""

    path: Path  # where it was read from
    bounds: Mapping[Action, Pair]  # (shortest, longest) duration of every action, milliseconds
    notes: PipelineNotes  # what else it says
    order: ScheduleOrder | None  # the order it belongs to, if that lies beside it
    n_stages: int  # number of stages
    n_microbatches: int  # number of microbatches
    # What messages cost: their overhead, which is part of ``bounds``, and their latency.
    links: Links
    # What a step takes besides its batches, for each of them; 0 if it is not told.
    outside_ms: float = 0.0
    # 9 of 10 of the run's batches take between 1 / this and this times what the bounds say; None if
    # it is not told.
    interval_factor: float | None = None
    captured: float = 0.0  # part of the gradients' energy that frozen weights keep

    @property
    def n_ranks(self) -> int | None:
        """Number of pipeline ranks, where the file or the order beside it tells."""
        return self.notes.ranks if self.order is None else self.order.n_ranks

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Return the times of each stage: those noted, else medians over its microbatches.

        The overhead of messages is no part of them, unless ``keeps_overhead``.
        """
        if self.notes.stages is not None:
            return self.notes.stages
        bounds = self.bounds if self.keeps_overhead else _without_overhead(self)
        return tuple(
            complete_times(median_pairs(bounds, stage), is_first=stage == 0)
            for stage in range(self.n_stages)
        )

    def measured(self, dag: PipelineDag) -> DurationBounds:
        """Return the bounds as the run had them, whose pipeline ``dag`` is."""
        pairs = np.array([self.bounds[action] for action in dag.actions])
        links = self.links
        return DurationBounds(
            pairs[:, 0],
            pairs[:, 1],
            p2p_overhead_ms=links.p2p_overhead_ms,
            p2p_latency_ms=links.p2p_latency_ms,
        )

    @property
    def keeps_overhead(self) -> bool:
        """Whether nobody knows which actions have the overhead of a message in them."""
        return self.links.p2p_overhead_ms > 0.0 and self.order is None

    @property
    def derived_kinds(self) -> str:
        """Actions whose times were not measured but follow from others, such as "I and W"."""
        if self.notes.stages is not None:
            return ""
        kinds = {action.kind for action in self.bounds}
        if ActionKind.FULL_BACKWARD not in kinds:
            return "B"
        return "" if ActionKind.WEIGHT_BACKWARD in kinds else "I and W"


def bounds_file_text(dag: PipelineDag, bounds: DurationBounds, notes: PipelineNotes) -> str:
    """Write bounds that fit ``dag``, and notes, as JSON; ``bounds_from_json`` reads the bounds.

    Raises:
        ValueError: As ``bounds_to_json``.
    """
    text = bounds_to_json(dag, bounds)
    assert text.endswith(_END)  # as json.dumps ends an object that is indented
    return f'{text.removesuffix(_END)},\n  "{PIPELINE}": {notes_to_json(notes)}{_END}'


def read_bounds_file(path: Path) -> BoundsFile:
    """Read a bounds file, its notes, and the order beside it if there is one.

    Raises:
        ValueError: If a file cannot be read or is none of ours; the message names file, row and
            key.
    """
    text = _read(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        told: object = error
        if isinstance(error, json.JSONDecodeError):
            told = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ValueError(f"{path}: {told}; a bounds file is JSON") from error
    if not isinstance(data, dict) or not isinstance(data.get("bounds"), dict):
        raise ValueError(
            f'{path} is no bounds file: it has no object "bounds"; a run saves one as bounds.json'
        )
    try:
        table = parse_bounds(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    bounds = table.pairs
    if not bounds:
        raise ValueError(f"{path}: bounds is empty")
    n_stages = 1 + max(action.stage for action in bounds)
    n_microbatches = 1 + max(action.microbatch for action in bounds)
    _check_bounds(path, bounds, n_stages, n_microbatches)
    notes = parse_notes(f"{path}: {PIPELINE}", data.get(PIPELINE, {}), n_stages)
    links = Links(table.p2p_overhead_ms, table.p2p_latency_ms)
    order = _order_beside(path, bounds)
    file = BoundsFile(
        path,
        bounds,
        notes,
        order,
        n_stages,
        n_microbatches,
        links,
        table.outside_ms,
        table.interval_factor,
        table.captured,
    )
    if not file.keeps_overhead:
        _without_overhead(file)
    return file


def _without_overhead(file: BoundsFile) -> dict[Action, Pair]:
    """Return the bounds without the overhead of messages, which a rounding error may miss."""
    overhead_ms = file.links.p2p_overhead_ms
    if file.order is None or overhead_ms == 0.0:
        return dict(file.bounds)
    dag = build_dag(file.order)
    found = dict(file.bounds)
    for i in np.flatnonzero(receiving(dag)).tolist():
        action = dag.actions[i]
        low, high = file.bounds[action]
        if low < overhead_ms * (1.0 - 1e-9):
            raise ValueError(
                f"{file.path}: bounds.{action}.min_ms is {low}, less than the overhead of the "
                f"message in it (p2p_overhead_ms, {overhead_ms})"
            )
        found[action] = (max(low - overhead_ms, 0.0), max(high - overhead_ms, 0.0))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _check_bounds(
    path: Path, bounds: Mapping[Action, Pair], n_stages: int, n_microbatches: int
) -> None:
    for action, (low, high) in bounds.items():
        where = f"{path}: bounds.{action}"
        if low > high:
            raise ValueError(f"{where}: min_ms {low} is above max_ms {high}")
        if low < high and not action.kind.freezable:
            raise ValueError(
                f"{where}: min_ms {low} and max_ms {high} differ; {action.kind.value} computes no "
                "weight gradient, so both must be equal"
            )
    for stage, microbatch in itertools.product(range(n_stages), range(n_microbatches)):
        forward, full, inputs, weights = (Action(stage, k, microbatch) for k in ActionKind)
        if forward not in bounds:
            raise ValueError(f"{path}: bounds has no {forward}")
        if (inputs in bounds) != (weights in bounds) or (full in bounds) == (inputs in bounds):
            raise ValueError(
                f"{path}: bounds must have either {full} or both {inputs} and {weights}"
            )


def _order_beside(path: Path, bounds: Mapping[Action, Pair]) -> ScheduleOrder | None:
    beside = path.parent / ORDER_FILE
    if not beside.is_file():
        return None
    try:
        order = order_from_csv(_read(beside))
    except ValueError as error:
        raise ValueError(f"{beside}: {error}") from error
    odd = sorted(map(str, {action for row in order.ranks for action in row} ^ set(bounds)))
    if odd:
        raise ValueError(
            f"{path} and {beside.name} beside it do not have the same actions: {odd[0]} is in only "
            f"one of them ({len(odd)} such actions); keep the two files of one run together"
        )
    return order


class Recall(NamedTuple):
    """The measured batch from its bounds and from times of stages, nothing frozen, milliseconds."""

    measured_ms: float
    from_stages_ms: float


def recall(file: BoundsFile, n_processors: float | None = None) -> Recall | None:
    """Compare what was measured with what times of stages make of it, nothing frozen.

    Microbatches of a stage are taken to be alike, and stages to be those of ``stage_times``; this
    tells what that costs. None where the order is not beside the file.
    """
    if file.order is None:
        return None
    dag = build_dag(file.order)
    measured = file.measured(dag).max_ms
    modelled = bounds_from_times(dag, file.stage_times()).max_ms + file.links.lead_ms(dag)
    delays = file.links.delays_ms(dag)
    return Recall(
        play_batch(dag, measured, n_processors, delays)[1],
        play_batch(dag, modelled, n_processors, delays)[1],
    )
