"""What a run is called above its plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.files import field_of, parse_json, shown, whole_of

SETTINGS_FILE = "settings.json"
_MOST_CHARACTERS = 80
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
    """Return what a run's settings say; None where there are none, as beside a bare plan.

    Raises:
        ValueError: If its settings are no run's.
    """
    path = run_folder / SETTINGS_FILE
    if not path.exists():
        return None
    try:
        settings = parse_json(path.read_bytes())
        sections = ("parallelism", "emulation", "training")
        parallelism, emulation, training = (_section(settings, name) for name in sections)
        csv = parallelism.get(f"{_SCHEDULE}_csv")
        schedule = _word(settings, "parallelism", f"{_SCHEDULE}_csv" if csv else _SCHEDULE)
        degree = parallelism.get(_DEGREE, 1)
        return RunNames(
            method=_word(settings, "freezing", "method"),
            schedule=Path(schedule).name if csv else schedule,
            n_ranks=whole_of(f"parallelism.{_DEGREE}", degree, least=1),
            model=f"{_word(settings, 'model', 'name')} {_word(settings, 'model', 'flavor')}",
            is_emulated=emulation.get("enable") is True,
            unit="images" if training.get("dataset") == "images" else "tokens",
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no run's settings: {error}") from error


def run_title(run_folder: Path) -> str:
    """Return method, schedule, ranks and model of a run, as plots can draw it.

    It is the folder's name if there are no settings, or none that can be read: they spoil no
    plot of what was measured.
    """
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


def _section(settings: Any, name: str) -> dict[str, Any]:
    """Return a section, empty where it is missing: older runs have fewer of them."""
    if not isinstance(settings, dict):
        raise ValueError(f"the whole is {shown(settings)}; it must be an object")
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name} is {shown(section)}; it must be an object")
    return section


def _word(settings: Any, section: str, key: str) -> str:
    value = field_of(section, field_of("", settings, section), key)
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{section}.{key} is {shown(value)}; it must be a text of one line")
    return value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}..."
