"""Backward times against what was frozen: ``responses.csv``, Fig. 15 of arXiv:2602.05754."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.runs.table import read_table, write_table

FILE = "responses.csv"
PROFILE_FILE = "response.json"


@dataclass(frozen=True)
class ResponseRow:
    """One backward.

    Attributes:
        stage: Its stage.
        kind: "B", or "W" for the weight half of a split one.
        phase: Phase of the run it was timed in. "profile" where each stage was timed alone, with
            the way of freezing the first one behind it; it is the median of several then.
        microbatch: Its microbatch; -1 where that is not known.
        share: Share of the stage's elements that it froze.
        duration_ms: How long it took.
        cut: 1 if it computed no input gradient because nobody needed it, else 0.
    """

    stage: int
    kind: str
    phase: str
    microbatch: int
    share: float
    duration_ms: float
    cut: int = 0


def write_responses(run_folder: Path, rows: Iterable[ResponseRow]) -> None:
    """Write the responses of a run."""
    write_table(run_folder / FILE, ResponseRow, rows)


def read_responses(folder: Path) -> list[ResponseRow]:
    """Read what a run or a profile has in its folder.

    Raises:
        OSError: If there is neither.
        ValueError: If the file cannot be understood.
    """
    if (folder / FILE).exists() or not (folder / PROFILE_FILE).exists():
        return read_table(folder / FILE, ResponseRow)
    path = folder / PROFILE_FILE
    try:
        return _of_profile(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what a profile writes: {error!r}") from error


def _of_profile(profile: Any) -> list[ResponseRow]:
    """Return the medians of a profile, of the first stage for each way of freezing it."""
    return [
        ResponseRow(
            stage=stage["stage"],
            kind=kind,
            phase=f"profile {stage['first_stage']}" if stage["first_stage"] else "profile",
            microbatch=-1,
            share=point["share"],
            duration_ms=point["median_ms"],
        )
        for stage in profile["stages"]
        for kind, curve in stage["curves"].items()
        for point in curve["points"]
    ]
