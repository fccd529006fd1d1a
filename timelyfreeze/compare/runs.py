"""The runs of a comparison, read from the files that they left.

A run leaves ``summary.json`` and ``losses.csv`` in its folder when it ends, ``settings.json`` and
``steps.csv`` while it goes on, and ``evaluate.sh`` its scores in ``scores.json``. One that was
started by ``compare_methods.py run`` has a record as well, in the folder that the run was started
in; it tells of runs that never came to writing a summary.

The keys are those of ``timelyfreeze.records.summary``, which would bring torch along if imported.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from reprlib import repr
from typing import Any

from timelyfreeze.compare.settings import SETTINGS, Settings, flatten
from timelyfreeze.records import LOSSES_FILE as LOSSES
from timelyfreeze.records import STEPS_FILE as STEPS
from timelyfreeze.records import Scores, read_losses, read_scores

SUMMARY = "summary.json"
RECORD = "comparison_run.json"
# Holds what runs left that did not end; nothing in it counts.
SET_ASIDE = "set_aside"

FINISHED, UNFINISHED, FAILED = "finished", "unfinished", "failed"

TEXTS = (
    "method", "schedule", "config_file", "model", "dataset", "device", "torch_version",
    "started_at", "failure", "switched_off", "ended_early", "reference_run", "reference_device",
)  # fmt: skip
NUMBERS = (
    "seed", "data_seed", "n_devices", "ranks_per_replica", "steps", "steps_done",
    "tokens_per_second_unfrozen", "tokens_per_second", "step_ms_unfrozen", "step_ms",
    "batches_per_step", "outside_ms", "step_ms_predicted",
    "emulated_ranks", "virtual_tokens_per_second_unfrozen", "virtual_tokens_per_second",
    "virtual_step_ms_unfrozen", "virtual_step_ms", "step_ms_off", "virtual_step_ms_off",
    "real_batch_ms_unfrozen", "real_batch_ms",
    "batch_ms_unfrozen_predicted", "batch_ms_unfrozen", "batch_ms_predicted", "batch_ms",
    "all_frozen_batch_ms", "drift", "planned_gain", "upper_bound_gain", "average_freeze_ratio",
    "train_loss", "last_loss", "validation_loss", "seconds", "peak_memory_gib", "score_ms_per_step",
    "score_memory_mib", "kappa", "p_eff", "kappa_over_p_eff", "never_updated_tensors",
    "never_updated_elements", "reference_loss", "reference_seconds", "seconds_to_reference_loss",
)  # fmt: skip
BY_STAGE = ("planned_stage_ratios", "stage_ratios")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        folder: Where its files are.
        status: ``finished``, ``unfinished`` or ``failed``. A run is finished if it did all the
            steps that it was asked for.
        summary: What the run says of itself; a metric that it does not know is None or missing.
        losses: (seconds of training so far, training loss) of each step that was logged.
        scores: Of the model that came out, None if it was not evaluated.
        validation_losses: (seconds of training so far, loss) of each validation.
        freeze_ratios: (step, freeze ratio) of each step for which it is known.
        settings: The run's configuration, flat; empty if the run left none.
    """

    folder: Path
    status: str
    summary: Mapping[str, Any]
    losses: tuple[tuple[float, float], ...] = ()
    scores: Scores | None = None
    validation_losses: tuple[tuple[float, float], ...] = ()
    freeze_ratios: tuple[tuple[float, float], ...] = ()
    settings: Settings = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The freezing method."""
        return str(self.summary["method"])

    @property
    def schedule(self) -> str:
        """The pipeline schedule; ``-`` without a pipeline."""
        return self.summary.get("schedule") or "-"

    @property
    def seed(self) -> int | None:
        """The seed of the weights, or None if none was set."""
        return self.summary.get("seed")

    @property
    def label(self) -> str:
        """What a reader calls the run."""
        return f"{self.schedule} {self.method} seed {'-' if self.seed is None else self.seed}"


@dataclass(frozen=True)
class FoundRuns:
    """All runs below some folders, and what could not be read there."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()


def find_runs(folders: Iterable[Path]) -> FoundRuns:
    """Return the runs below ``folders``, in the order of their paths.

    A record without any summary below it makes a run too: one that failed, or was cut off.

    Raises:
        ValueError: If one of ``folders`` is not a folder.
    """
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name folders that hold runs")
    runs: list[Run] = []
    unreadable: list[str] = []
    for path in _below(folders, SUMMARY):
        try:
            runs.append(read_run(path.parent))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path.parent}: {error}")
    for path in _below(folders, RECORD):
        place = path.parent
        try:
            recorded = _recorded_run(place)
        except (OSError, ValueError) as error:
            unreadable.append(f"{place}: {error}")
            continue
        own = [i for i, run in enumerate(runs) if run.folder.is_relative_to(place)]
        if not own:
            runs.append(recorded)
        elif all(runs[i].status != FINISHED for i in own):
            for i in own:
                runs[i] = replace(runs[i], status=recorded.status)
    return FoundRuns(tuple(sorted(runs, key=lambda run: run.folder)), tuple(unreadable))


def read_run(folder: Path) -> Run:
    """Read the summary, the losses and the scores in ``folder``.

    Raises:
        OSError: If there is no summary.
        ValueError: If a file does not hold what it should; the key or the line is named.
    """
    summary = read_object(folder / SUMMARY)
    if not summary.get("method"):
        raise ValueError(f"{SUMMARY} names no method; it is not the summary of a run")
    for fits, what, keys in (
        (is_text, "text in one line", TEXTS),
        (is_number, "a number", NUMBERS),
        (is_by_stage, "an object of numbers by stage", BY_STAGE),
    ):
        for key in keys:
            value = summary.get(key)
            if value is not None and not fits(value):
                raise ValueError(f"{SUMMARY}: {key} is {repr(value)}; it must be {what} or null")
    if summary.get("started_at"):
        _require_time(summary["started_at"])
    steps, done = summary.get("steps"), summary.get("steps_done")
    status = FINISHED if done is not None and done == steps else UNFINISHED
    logged = read_losses(folder) if (folder / LOSSES).exists() else []
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    return Run(
        folder,
        status,
        summary,
        tuple((row.seconds, row.train_loss) for row in logged if row.train_loss is not None),
        read_scores(folder),
        tuple(
            (row.seconds, row.validation_loss) for row in logged if row.validation_loss is not None
        ),
        read_freeze_ratios(folder / STEPS),
        flatten(settings),
    )


def read_freeze_ratios(path: Path) -> tuple[tuple[float, float], ...]:
    """Return (step, freeze ratio) of the steps whose ratio is known; none if there is no file.

    Whatever other columns the file has: runs of other versions are compared too.

    Raises:
        ValueError: If a column is missing or a cell is no number.
    """
    if not path.exists():
        return ()
    pairs = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                try:
                    if row["freeze_ratio"]:
                        pairs.append((float(row["step"]), float(row["freeze_ratio"])))
                except (KeyError, TypeError, ValueError):
                    raise ValueError(
                        f"{path.name}: {repr(row)} does not give step and freeze_ratio as numbers"
                    ) from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name}, line {rows.line_num + 1}: {error}") from None
    return tuple(pairs)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: If there is no such file.
        ValueError: If it holds anything else.
    """
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is {type(value).__name__}; it must be an object")
    return value


def is_text(value: Any) -> bool:
    """Tell whether a value from JSON can stand in a cell."""
    return isinstance(value, str) and value.isprintable()


def is_number(value: Any) -> bool:
    """Tell whether a value from JSON is a number; a loss may well be NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def is_by_stage(value: Any) -> bool:
    """Tell whether a value from JSON is an object of numbers by stage."""
    return isinstance(value, dict) and all(
        stage.isdecimal() and is_number(ratio) for stage, ratio in value.items()
    )


def _require_time(text: str) -> None:
    try:
        zone = datetime.fromisoformat(text).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise ValueError(f"{SUMMARY}: started_at is {repr(text)}; it must be a time with offset")


def _recorded_run(place: Path) -> Run:
    """Return the run of a record as one that left no summary."""
    record = read_object(place / RECORD)
    missing = {"schedule", "method", "seed", "exit_status"} - record.keys()
    if missing:
        raise ValueError(f"{RECORD} lacks {', '.join(sorted(missing))}")
    asked = {key: record[key] for key in ("schedule", "method", "seed")}
    for key, value in asked.items():
        fits = is_number(value) if key == "seed" else is_text(value)
        if not (fits or value is None) or (key == "method" and not value):
            raise ValueError(f"{RECORD}: {key} is {repr(value)}; it does not name a run")
    # Without an exit status it was cut off together with whoever had started it.
    return Run(place, UNFINISHED if record["exit_status"] is None else FAILED, asked)


def _below(folders: Iterable[Path], name: str) -> list[Path]:
    """Return the files called ``name`` below ``folders``, each once."""
    found = {
        path.resolve()
        for folder in folders
        for path in folder.rglob(name)
        if SET_ASIDE not in path.relative_to(folder).parts
    }
    return sorted(found)
