"""What a bounds file says of its pipeline besides the bounds: the object "pipeline" in it.

    "pipeline": {
      "schedule": "1F1B", "ranks": 4, "processors": 2.0, "first_stage": "all_or_nothing",
      "skip_input_grads": "use", "layers": [8, 9, 8, 7], "tokens_per_microbatch": 2048,
      "stages": [{"forward_ms": ...}, ...], "layer": {...}, "fixed": {...}
    }

Every key of it may be missing. The last three are what a profile measured of every stage in full
and in split backwards, and the overheads at which layers move (``layer_model.LayerModel``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from timelyfreeze.files import listed, shown
from timelyfreeze.settings import FIRST_STAGE_MODES, SKIP_INPUT_GRADS
from timelyfreeze.whatif.times import StageTimes


@dataclass(frozen=True)
class PipelineNotes:
    """What a bounds file says of its pipeline besides the bounds; None where it does not say.

    Attributes:
        schedule: Name of the schedule that was measured.
        ranks: Number of pipeline ranks.
        processors: How many of them compute at once; times are then processor times. None if each
            has a device of its own.
        first_stage: How the first stage was frozen: one of ``settings.FIRST_STAGE_MODES``.
        skip_input_grads: What is done about backwards that nobody needs: one of ``settings.SKIP_INPUT_GRADS``.
        layers: Number of layers of each stage.
        tokens_per_microbatch: Tokens of a microbatch, padding included.
        stages: Times of each stage, in full and in split backwards.
        layer: Overhead of a layer.
        fixed: Overhead of a stage without layers.
    """

    schedule: str | None = None
    ranks: int | None = None
    processors: float | None = None
    first_stage: str | None = None
    skip_input_grads: str | None = None
    layers: tuple[int, ...] | None = None
    tokens_per_microbatch: int | None = None
    stages: tuple[StageTimes, ...] | None = None
    layer: StageTimes | None = None
    fixed: StageTimes | None = None


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
    if not isinstance(plain, dict):
        raise ValueError(f"{where} is {shown(plain)}; it must be an object")
    known = {field.name for field in fields(PipelineNotes)}
    if unknown := sorted(set(plain) - known):
        raise ValueError(f"{where} has unknown keys: {listed(unknown)}; a newer version wrote it")
    layers = _list(f"{where}.layers", plain.get("layers"), n_stages)
    stages = _list(f"{where}.stages", plain.get("stages"), n_stages)
    return PipelineNotes(
        schedule=_word(f"{where}.schedule", plain.get("schedule")),
        ranks=_count(f"{where}.ranks", plain.get("ranks"), least=1),
        processors=_positive(f"{where}.processors", plain.get("processors")),
        first_stage=_word(f"{where}.first_stage", plain.get("first_stage"), FIRST_STAGE_MODES),
        skip_input_grads=_word(
            f"{where}.skip_input_grads", plain.get("skip_input_grads"), SKIP_INPUT_GRADS
        ),
        layers=None
        if layers is None
        else tuple(_count(f"{where}.layers[{i}]", n, least=0) or 0 for i, n in enumerate(layers)),
        tokens_per_microbatch=_count(
            f"{where}.tokens_per_microbatch", plain.get("tokens_per_microbatch"), least=1
        ),
        stages=None
        if stages is None
        else tuple(_times(f"{where}.stages[{i}]", row) for i, row in enumerate(stages)),
        layer=_overheads(f"{where}.layer", plain.get("layer")),
        fixed=_overheads(f"{where}.fixed", plain.get("fixed")),
    )


def _word(where: str, value: Any, known: tuple[str, ...] | None = None) -> str | None:
    if value is None:
        return None
    fits = isinstance(value, str) and (value.isprintable() if known is None else value in known)
    if not fits:
        raise ValueError(
            f"{where} is {shown(value)}; known: {', '.join(known or ('any printable word',))}"
        )
    return str(value)


def _count(where: str, value: Any, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where} is {shown(value)}; it must be a whole number, {least} or more")
    return value


def _positive(where: str, value: Any) -> float | None:
    if value is None:
        return None
    if (isinstance(value, bool) or not isinstance(value, int | float)) or not (
        0 < value <= sys.float_info.max
    ):
        raise ValueError(f"{where} is {shown(value)}; it must be a number above 0")
    return float(value)


def _list(where: str, value: Any, length: int) -> list[Any] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{where} must be a list of {length}, one for each stage")
    return value


def _overheads(where: str, value: Any) -> StageTimes | None:
    """Read six numbers, which may be below 0: overheads are differences of times."""
    if value is None:
        return None
    names = [field.name for field in fields(StageTimes)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{where} must have the keys {', '.join(names)}")
    for name in names:
        number = value[name]
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not abs(number) <= sys.float_info.max
        ):
            raise ValueError(
                f"{where}.{name} is {shown(number)}; it must be a finite number of milliseconds"
            )
    return StageTimes(**{name: float(value[name]) for name in names})


def _times(where: str, value: Any) -> StageTimes:
    times = _overheads(where, value)
    if times is None:
        raise ValueError(f"{where} is missing")
    if errors := times.errors():
        raise ValueError(f"{where}: {'; '.join(errors)}")
    return times
