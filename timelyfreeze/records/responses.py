"""Backward times against what was frozen: ``responses.csv``, Fig. 15 of arXiv:2602.05754."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from timelyfreeze.files import (
    Count,
    Fraction,
    OneOf,
    Table,
    field_of,
    keys_of,
    list_of,
    number_of,
    parse_json,
    whole_of,
)
from timelyfreeze.files.table import MOST, Within
from timelyfreeze.settings import FIRST_STAGE_MODES, Phase

PROFILE_FILE = "response.json"
_PROFILE = "profile"
_PROFILES = (_PROFILE, *(f"{_PROFILE} {mode}" for mode in FIRST_STAGE_MODES))


@dataclass(frozen=True)
class ResponseRow:
    """One backward.

    Attributes:
        stage: Its stage.
        kind: "B", or "W" for the weight half of a split one.
        phase: Phase of the run it was timed in. "profile" where each stage was timed alone, with
            the way of freezing the first one behind it; it is the median of several then.
        microbatch: Its microbatch; -1 where that is not known.
        fraction: Fraction of the stage's elements that it froze.
        duration_ms: How long it took.
        cut: 1 if it computed no input gradient because nobody needed it, else 0.
    """

    stage: Count
    kind: Annotated[str, OneOf("B", "W")]
    phase: Annotated[str, OneOf(*(phase.value for phase in Phase), *_PROFILES)]
    microbatch: Annotated[int, Within(-1, MOST)]
    fraction: Fraction
    duration_ms: float
    cut: Annotated[int, Within(0, 1)] = 0


RESPONSES = Table("responses.csv", ResponseRow)


def read_responses(folder: Path) -> list[ResponseRow]:
    """Read what a run or a profile has in its folder.

    Raises:
        OSError: If there is neither.
        ValueError: If the file cannot be understood.
    """
    path = folder / PROFILE_FILE
    if (folder / RESPONSES.name).exists() or not path.exists():
        return RESPONSES.read(folder)
    try:
        return _of_profile(parse_json(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} is not what a profile writes: {error}") from error


def _of_profile(profile: Any) -> list[ResponseRow]:
    """Return the medians of a profile, of the first stage for each way of freezing it."""
    rows = []
    for i, stage in enumerate(list_of("stages", field_of("", profile, "stages"))):
        where = f"stages.{i}"
        number = whole_of(f"{where}.stage", field_of(where, stage, "stage"))
        way = field_of(where, stage, "first_stage")
        curves = field_of(where, stage, "curves")
        for kind in keys_of(f"{where}.curves", curves):
            there = f"{where}.curves.{kind[:60]}"
            points = field_of(there, curves[kind], "points")
            for j, point in enumerate(list_of(f"{there}.points", points)):
                here = f"{there}.points.{j}"
                row = ResponseRow(
                    stage=number,
                    kind=kind,
                    phase=f"{_PROFILE} {way}" if way else _PROFILE,
                    microbatch=-1,
                    fraction=number_of(f"{here}.fraction", field_of(here, point, "fraction")),
                    duration_ms=number_of(f"{here}.median_ms", field_of(here, point, "median_ms")),
                )
                try:
                    RESPONSES.check(row)
                except ValueError as error:
                    raise ValueError(f"{here}: {error}") from error
                rows.append(row)
    return rows
