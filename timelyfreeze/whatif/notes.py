"""What a bounds file says of its pipeline besides the bounds: the object "pipeline" in it.

    "pipeline": {
      "schedule": "1F1B", "ranks": 4, "processors": 2.0, "first_stage": "all_or_nothing",
      "skip_input_grads": "use", "layers": [8, 9, 8, 7], "tokens_per_microbatch": 2048,
      "unit": "tokens",
      "stages": [{"forward_ms": ...}, ...], "layer": {...}, "fixed": {...},
      "parameters": {"first": ..., "layers": [...], "last": ...}, "memory": {...}
    }

Every key of it may be missing. Stages, layer and fixed are what a profile measured of every stage
in full and in split backwards, and the overheads at which layers move (``layer_model.LayerModel``).
The last two are the sizes of the model's parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from timelyfreeze.files import keys_of, listed, number_of, read_dataclass, shown, whole_of
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.whatif.loads import PartParameters
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes, PartBytes
from timelyfreeze.whatif.times import StageTimes

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class PipelineNotes:
    """What a bounds file says of its pipeline besides the bounds; None where it does not say.

    Attributes:
        schedule: Name of the schedule that was measured.
        ranks: Number of pipeline ranks.
        processors: How many of them compute at once; times are then processor times. None if each
            has a device of its own.
        first_stage: How the first stage was frozen: one of ``settings.FIRST_STAGE_MODES``.
        skip_input_grads: What is done about input gradients that nobody needs: one of
            ``settings.SKIP_INPUT_GRADS``.
        layers: Number of layers of each stage.
        tokens_per_microbatch: Tokens of a microbatch, padding included; of ``unit``, if that is
            something else.
        unit: What throughput counts: "tokens" or "images".
        stages: Times of each stage, in full and in split backwards.
        layer: Overhead of a layer.
        fixed: Overhead of a stage without layers.
        parameters: Parameters of the model's parts.
        memory: Bytes of the model's parts, with the microbatches and types that were measured.
    """

    schedule: str | None = None
    ranks: int | None = None
    processors: float | None = None
    first_stage: str | None = None
    skip_input_grads: str | None = None
    layers: tuple[int, ...] | None = None
    tokens_per_microbatch: int | None = None
    unit: str | None = None
    stages: tuple[StageTimes, ...] | None = None
    layer: StageTimes | None = None
    fixed: StageTimes | None = None
    parameters: PartParameters | None = None
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
    known = {field.name for field in fields(PipelineNotes)}
    if unknown := sorted(set(keys_of(where, plain)) - known):
        raise ValueError(f"{where} has unknown keys: {listed(unknown)}; a newer version wrote it")

    def read(key: str, parse: Callable[[str, Any], _Value]) -> _Value | None:
        value = plain.get(key)
        return None if value is None else parse(f"{where}.{key}", value)

    def each(parse: Callable[[str, Any], _Value]) -> Callable[[str, Any], tuple[_Value, ...]]:
        return lambda place, value: tuple(
            parse(f"{place}[{i}]", one) for i, one in enumerate(_list(place, value, n_stages))
        )

    return PipelineNotes(
        schedule=read("schedule", _word),
        ranks=read("ranks", _count),
        processors=read("processors", _positive),
        first_stage=read("first_stage", partial(_word, known=FIRST_STAGE_MODES)),
        skip_input_grads=read("skip_input_grads", partial(_word, known=SKIP_INPUT_GRADS)),
        layers=read("layers", each(whole_of)),
        tokens_per_microbatch=read("tokens_per_microbatch", _count),
        unit=read("unit", partial(_word, known=("tokens", "images"))),
        stages=read("stages", each(_times)),
        layer=read("layer", _overheads),
        fixed=read("fixed", _overheads),
        parameters=read("parameters", partial(_parameters, plain.get("layers"))),
        memory=read("memory", partial(_memory, plain.get("layers"))),
    )


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


def _sizes(kind: type[_Value], where: str, value: Any) -> _Value:
    """Read numbers of parameters or bytes, also of parts, none of them below 0."""

    def check(where: str, value: Any) -> None:
        for key in keys_of(where, value):
            one = value[key]
            if isinstance(one, dict):
                check(f"{where}.{key}", one)
            else:
                whole_of(f"{where}.{key}", one, most=_MOST)

    found = read_dataclass(kind, value, where)
    check(where, value)
    return found


def _parameters(split: Any, where: str, value: Any) -> PartParameters:
    """Read numbers of parameters; files of former releases have one number for all layers."""
    read = partial(whole_of, most=_MOST)
    plain = {key: value[key] for key in keys_of(where, value)}
    if split is not None and "layer" in plain:
        plain["layers"] = [read(f"{where}.layer", plain.pop("layer"))] * sum(split)
    if unknown := sorted(plain.keys() - {"first", "layers", "last"}):
        raise ValueError(f"{where} has unknown fields: {listed(unknown)}")
    if missing := [key for key in ("first", "layers", "last") if key not in plain]:
        raise ValueError(f"{where} lacks {listed(missing)}")
    layers = plain["layers"]
    if not isinstance(layers, list) or not layers or len(layers) != sum(split or [len(layers)]):
        raise ValueError(f"{where}.layers must be a list with a number for each layer")
    return PartParameters(
        read(f"{where}.first", plain["first"]),
        tuple(read(f"{where}.layers[{i}]", one) for i, one in enumerate(layers)),
        read(f"{where}.last", plain["last"]),
    )


def _memory(split: Any, where: str, value: Any) -> ModelBytes:
    """Read bytes of parts; of a model whose layers differ, of each layer."""
    plain = {key: value[key] for key in keys_of(where, value)}
    if "blocks" not in plain:
        return _sizes(ModelBytes, where, plain)
    each, sent = plain.pop("blocks"), plain.pop("outputs", None)
    alike = _sizes(ModelBytes, where, plain)
    n_layers = sum(split) if split is not None else len(each) if isinstance(each, list) else 0
    blocks = [
        _sizes(PartBytes, f"{where}.blocks[{i}]", one)
        for i, one in enumerate(_list(f"{where}.blocks", each, n_layers, "layer"))
    ]
    outputs = _list(f"{where}.outputs", sent, n_layers + 1, "layer and the embedding")
    return BlockBytes(
        **vars(alike),
        blocks=tuple(blocks),
        outputs=tuple(
            whole_of(f"{where}.outputs[{i}]", one, most=_MOST) for i, one in enumerate(outputs)
        ),
    )


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
