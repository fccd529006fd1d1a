"""What would keep the runs of a comparison from starting, found before the first one starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.cli import run_environment
from timelyfreeze.cli.checker import errors_of
from timelyfreeze.compare.runs.jobs import ROOT, Job, Settings, is_finished
from timelyfreeze.compare.runs.scoring import Questions
from timelyfreeze.files import listed

_TRAINER = "torchtitan.freezing.launch"
_EVALUATE = "torchtitan.evaluation.command"


def require_startable(jobs: Sequence[Job], settings: Settings, output: Path) -> None:
    """Check the configuration of each run that is still to be made, all in one process.

    What is fitted to runs made before is not known yet, and is checked by the run alone.

    Raises:
        ValueError: Naming each error, and the runs that have it.
    """
    waiting = [job for job in jobs if not is_finished(output / job.path)]
    if not waiting:
        return
    nproc = waiting[0].nproc  # as of all
    variables = {**run_environment(os.environ, nproc), "WORLD_SIZE": str(nproc)}
    lines = [job.arguments(settings, _new(output / job.path)) for job in waiting]
    found: dict[str, list[str]] = {}
    for job, error in zip(waiting, errors_of(_TRAINER, lines, variables, ROOT), strict=True):
        if error is not None:
            found.setdefault(error, []).append(job.label)
    if found:
        told = (f"{listed(labels)} cannot start:\n{error}" for error, labels in found.items())
        raise ValueError("\n".join(told))


def require_questions(questions: Questions, output: Path) -> None:
    """Check the options of ``evaluate``.

    Raises:
        ValueError: Naming what is wrong with them.
    """
    line = questions.arguments(output, output)
    (error,) = errors_of(_EVALUATE, [line], run_environment(os.environ, 1), ROOT)
    if error is not None:
        raise ValueError(f"--evaluate: {error.rpartition('error: ')[2]}")


def _new(folder: Path) -> Path:
    """Return a folder like ``folder`` that is not there: what is in it is set aside for a run."""
    return folder.with_name(f"{folder.name}_new") if folder.exists() else folder
