"""Finds what keeps a run from going on in another size, before any process has to try.

Weights, optimizers and instruction data go on in any number of data-parallel ranks; so does
freezing, in a pipeline of the same stages and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.control import pipeline_error, rank_keys, saved_states
from timelyfreeze.policies import NONE
from timelyfreeze.settings import arguments_named
from torchtitan.checkpoints.finished import saved_keys, saved_values
from torchtitan.data.turns import is_instruct_dataset
from torchtitan.freezing.checks.parallel import data_parallel_degree
from torchtitan.freezing.config import JobConfig, toml_key

_FREEZING, _DATA = "freezing", "dataloader"
_WORLD_SIZE = f"{_DATA}.world_size"


def resize_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Say why a run cannot go on from the checkpoint in ``folder``, which is whole."""
    excluded = config.checkpoint.exclude_from_loading
    keys = saved_keys(folder)
    try:
        if config.freezing.method != NONE and _FREEZING not in excluded:
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
    parallelism = config.parallelism
    n_microbatches = (
        config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    )
    with arguments_named(toml_key):
        error = pipeline_error(states, parallelism.pipeline_parallel_degree, n_microbatches)
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
