"""Finds what keeps a run from resuming, in this size or another, or from being saved.

Weights, optimizers and instruction data go on in any number of data-parallel ranks. So does a
policy without a plan, in any pipeline; a plan only in one of the same stages and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.control import pipeline_error, rank_keys, saved_states
from timelyfreeze.files import write_obstacle
from timelyfreeze.policies import makes_plan
from timelyfreeze.settings import arguments_named
from torchtitan.checkpoints.finished import damage, finished_steps, saved_keys, saved_values
from torchtitan.data.rows.kinds import is_instruct_dataset
from torchtitan.freezing.checks.parallel import data_parallel_degree
from torchtitan.freezing.checks.pipeline import n_microbatches
from torchtitan.freezing.config import JobConfig, toml_key

_FREEZING, _DATA = "freezing", "dataloader"
_WORLD_SIZE = f"{_DATA}.world_size"


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
            yield from _resize_errors(config, finished[step])
    elif checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        initial = Path(checkpoint.initial_load_path)
        problem = damage(initial) if initial.is_dir() else "it is no folder"
        if problem is not None:
            yield f"checkpoint.initial_load_path is {str(initial)!r}, and {problem}"
        elif not checkpoint.initial_load_model_only:
            yield from _resize_errors(config, initial)


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
    former = [s for s in finished if s < step and damage(finished[s]) is None]
    resume = ""
    if former:
        resume = f"checkpoint.load_step = {max(former)} resumes from the one before, or "
    yield (
        f"the checkpoint {str(finished[step])!r} is damaged: {problem}; {resume}move the folder "
        "away"
    )


def output_errors(config: JobConfig) -> Iterator[str]:
    """Say why nothing can be written where the run's files go."""
    folder = Path(config.job.dump_folder)
    obstacle = write_obstacle(folder)
    if obstacle is not None:
        yield f"job.dump_folder is {str(folder)!r}, and {obstacle}; name another folder"


def _resize_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Say why a run cannot go on from the checkpoint in ``folder``, which is whole."""
    excluded = config.checkpoint.exclude_from_loading
    keys = saved_keys(folder)
    try:
        if makes_plan(config.freezing.method) and _FREEZING not in excluded:
            yield from _pipeline_errors(config, folder, keys)
        if _WORLD_SIZE in keys and _DATA not in excluded:
            yield from _data_errors(config, folder)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        yield (
            f"the checkpoint {str(folder)!r} is damaged or foreign: what it says of freezing or "
            f"data cannot be read ({type(error).__name__}: {error}); checkpoint.load_step names an "
            'older one, checkpoint.exclude_from_loading = ["freezing", "dataloader"] begins anew'
        )


def _pipeline_errors(config: JobConfig, folder: Path, keys: list[str]) -> Iterator[str]:
    prefix = f"{_FREEZING}."
    names = rank_keys([key.removeprefix(prefix) for key in keys if key.startswith(prefix)])
    if not names:
        return  # saved without freezing, which is told where it is loaded
    values = saved_values(folder, [prefix + name for name in names])
    states = saved_states({key.removeprefix(prefix): text for key, text in values.items()})
    n_ranks, n = config.parallelism.pipeline_parallel_degree, n_microbatches(config)
    with arguments_named(toml_key):
        # Where keys contradict each other, that is reported as an error of its own.
        error = None if n is None else pipeline_error(states, n_ranks, n)
    if error is not None:
        yield f"{str(folder)!r}: {error}"


def _data_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    saved = saved_values(folder, [_WORLD_SIZE])[_WORLD_SIZE]
    degree = data_parallel_degree(config)
    dataset = config.training.dataset
    if degree in (None, saved) or is_instruct_dataset(dataset):
        return
    yield (
        f"the checkpoint {str(folder)!r} was saved with {saved} data-parallel ranks, and this run "
        f"has {degree} (parallelism.data_parallel_replicate_degree x data_parallel_shard_degree); "
        f"the data set {dataset!r} (training.dataset) goes on with as many only, instruction data "
        'with any; to start the data anew, set checkpoint.exclude_from_loading = ["dataloader"]'
    )
