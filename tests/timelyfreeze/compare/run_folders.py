"""Folders as runs leave them, written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WHAT = {
    "schedule": "1F1B",
    "seed": 42,
    "config_file": "configs/small.toml",
    "model": "llama3 8M",
    "dataset": "alpaca",
    "n_devices": 2,
    "ranks_per_replica": 2,
    "device": "some CPU, 2 cores",
    "torch_version": "2.13.0",
    "steps": 60,
    "steps_done": 60,
    "started_at": "2026-11-21T12:00:00+00:00",
}


def write_run(
    folder: Path,
    method: str,
    *,
    losses: Sequence[tuple[float, float]] = (),
    settings: dict[str, Any] | None = None,
    top1: Sequence[tuple[float, float]] = (),
    **summary: Any,
) -> Path:
    """Write a finished run.

    ``losses`` are (seconds, training loss) of the logged steps, ``top1`` (seconds, fraction) of the
    validations of a run on pictures.
    """
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({**WHAT, "method": method, **summary}))
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps(settings))
    rows = ["step,seconds,train_loss,validation_loss"]
    for step, (seconds, loss) in enumerate(losses, 1):
        rows += [f"{step},{seconds},{loss},", f"{step},{seconds},,0.5"]
    (folder / "losses.csv").write_text("\n".join(rows) + "\n")
    if top1:
        rows = [f"{step},{seconds},{share},1" for step, (seconds, share) in enumerate(top1, 1)]
        (folder / "accuracies.csv").write_text("\n".join(["step,seconds,top1,top5", *rows, ""]))
    return folder


def write_scores(folder: Path, accuracy: float, n_questions: int = 100, **more: Any) -> Path:
    """Write scores beside a run, the same accuracy in each of the four benchmarks."""
    folder.mkdir(parents=True, exist_ok=True)
    score = {
        "accuracy": accuracy,
        "stderr": None,
        "n_questions": n_questions,
        "questions": "test",
        "n_shots": 0,
        "metric": "acc",
    }
    keys = ("mmlu", "hellaswag", "arc_challenge", "truthfulqa_mc1")
    scores = {
        "model": "models/small",
        "step": 60,
        "source": "hub",
        "limit": None,
        "dtype": "float32",
        "device": "cpu",
        "versions": {},
        "evaluated_at": "2026-11-21T13:00:00+00:00",
        "benchmarks": dict.fromkeys(keys, score),
        **more,
    }
    (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def write_record(folder: Path, exit_status: int | None, **job: Any) -> Path:
    """Write the record of a run that `compare run` started."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schedule": "1F1B", "method": "apf", "seed": 42, **job, "exit_status": exit_status}
    (folder / "comparison_run.json").write_text(json.dumps(record))
    return folder


def keys_of(command: Sequence[str]) -> dict[str, str]:
    """Return the ``--key=value`` arguments of a command."""
    pairs = (word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
    return dict(pairs)


def table_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of the markdown table in ``text``, cells by title."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def table_notes(text: str) -> list[str]:
    """Return the lines below the table."""
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
