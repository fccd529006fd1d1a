"""Finds what keeps a run from resuming, or from being saved, before any process has to try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.files import write_obstacle
from torchtitan.checkpoints.finished import damage, finished_steps
from torchtitan.freezing.checks.resize import resize_errors
from torchtitan.freezing.config import JobConfig


def checkpoint_errors(config: JobConfig) -> Iterator[str]:
    """Say what is wrong with the checkpoint that a run would begin from."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    folder = Path(config.job.dump_folder) / checkpoint.folder
    finished = finished_steps(folder)
    if finished or (folder.is_dir() and checkpoint.load_step != -1):
        step = max(finished) if checkpoint.load_step == -1 else checkpoint.load_step
        errors = list(_resumed_errors(checkpoint.load_step, folder, finished))
        yield from errors
        if not errors and step > 0:  # upstream loads no more than the model from step 0
            yield from resize_errors(config, finished[step])
    elif checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        initial = Path(checkpoint.initial_load_path)
        problem = damage(initial) if initial.is_dir() else "it is no folder"
        if problem is not None:
            yield f"checkpoint.initial_load_path is {str(initial)!r}, and {problem}"
        elif not checkpoint.initial_load_model_only:
            yield from resize_errors(config, initial)


def _resumed_errors(load_step: int, folder: Path, finished: dict[int, Path]) -> Iterator[str]:
    step = max(finished) if load_step == -1 else load_step
    if step not in finished:
        known = ", ".join(map(str, sorted(finished))) or "none"
        yield (
            f"checkpoint.load_step is {load_step}, of which {str(folder)!r} has no finished "
            f"checkpoint; finished are: {known}"
        )
        return
    problem = damage(finished[step])
    if problem is None:
        return
    former = [s for s in sorted(finished) if s < step and damage(finished[s]) is None]
    instead = f"checkpoint.load_step = {former[-1]} resumes from the one before" if former else ""
    yield (
        f"the checkpoint {str(finished[step])!r} is damaged: {problem}; "
        + (f"{instead}, or move" if instead else "move")
        + " the folder away"
    )


def output_errors(config: JobConfig) -> Iterator[str]:
    """Say why nothing can be written where the run's files go."""
    folder = Path(config.job.dump_folder)
    obstacle = write_obstacle(folder)
    if obstacle is not None:
        yield f"job.dump_folder is {str(folder)!r}, and {obstacle}; name another folder"
