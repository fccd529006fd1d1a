"""What a run is called above its plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.files import Number, parse_json, read_as

SETTINGS_FILE = "settings.json"
_MOST_CHARACTERS = 80
_OBJECT = Mapping[str, Any]
_DEGREE, _SCHEDULE = "pipeline_parallel_degree", "pipeline_parallel_schedule"


@dataclass(frozen=True)
class RunNames:
    """What the settings of a run call its parts."""

    method: str  # its freezing method
    schedule: str  # its schedule; of one from a CSV file the file's name
    n_ranks: int  # ranks of its pipeline
    model: str  # its model
    is_emulated: bool  # whether one process ran all ranks
    unit: str  # what throughput counts: tokens, or images where the data set is pictures


def read_names(run_folder: Path) -> RunNames | None:
    """Return what a run's settings say; None where there are none, as beside a bare plan."""
    path = run_folder / SETTINGS_FILE
    if not path.exists():
        return None
    try:
        settings = read_as(_OBJECT, parse_json(path.read_bytes()), "the whole")
        sections = ("parallelism", "emulation", "training")
        parallelism, emulation, training = (_section(settings, name) for name in sections)
        csv = parallelism.get(f"{_SCHEDULE}_csv")
        schedule = _word(settings, "parallelism", f"{_SCHEDULE}_csv" if csv else _SCHEDULE)
        degree = parallelism.get(_DEGREE, 1)
        return RunNames(
            method=_word(settings, "freezing", "method"),
            schedule=Path(schedule).name if csv else schedule,
            n_ranks=read_as(Number, degree, f"parallelism.{_DEGREE}"),
            model=f"{_word(settings, 'model', 'name')} {_word(settings, 'model', 'flavor')}",
            is_emulated=emulation.get("enable") is True,
            unit="images" if training.get("dataset") == "images" else "tokens",
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no run's settings: {error}") from error


def run_title(run_folder: Path) -> str:
    """Return what a run is called above plots; without settings that can be read, its folder."""
    try:
        names = read_names(run_folder)
    except ValueError:
        names = None
    if names is None:
        return as_drawn(run_folder.resolve().name)
    words = ["without freezing" if names.method == "none" else names.method]
    if names.n_ranks > 1:
        words.append(f"{names.schedule} over {names.n_ranks} ranks")
    if names.is_emulated:
        words.append("emulated")
    return as_drawn(", ".join([*words, names.model]))


def as_drawn(text: str) -> str:
    """Return a text of which plots draw every character; between two $ they would see maths."""
    return text.replace("$", r"\$")


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, empty where it is missing: older runs have fewer of them."""
    section: Mapping[str, Any] = read_as(_OBJECT, settings.get(name, {}), name)
    return section


def _word(settings: Mapping[str, Any], section: str, key: str) -> str:
    value: str = read_as(str, _section(settings, section).get(key), f"{section}.{key}")
    return value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}..."
