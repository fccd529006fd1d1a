"""What a run notes beside its bounds: sizes, overheads and how they were measured, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from timelyfreeze.files import (
    keys_of,
    listed,
    number_of,
    read_dataclass,
    shown,
    whole_of,
)
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.whatif.loads import PartParameters
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes
from timelyfreeze.whatif.times import (
    StageTimes,
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
