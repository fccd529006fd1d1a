"""Where a training process keeps what the frozen front puts out, and what that depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from timelyfreeze.control.caching import ActivationStore, folder_for
from timelyfreeze.settings import GIB
from torchtitan.freezing.config import JobConfig, cache_folder


def front_store(job_config: JobConfig, rank: int) -> ActivationStore:
    """Return the store of a process, as ``[freezing.cache]`` wants it."""
    cache = job_config.freezing.cache
    folder = folder_for(Path(cache_folder(job_config)), rank, cache.disk_gib)
    return ActivationStore(int(cache.memory_gib * GIB), folder)


def front_identity(
    job_config: JobConfig, model_args: Any, device: torch.device, *, is_sharded: bool
) -> str:
    """Return what the front's output depends on besides its weights and a row's tokens.

    Args:
        job_config: Of the run.
        model_args: Of the model.
        device: Where it computes.
        is_sharded: Whether FSDP casts its numbers, where any are cast, and not autocast.
    """
    training = job_config.training
    numbers = training.dtype, training.mixed_precision_param, torch.get_default_dtype()
    are_cast = {training.dtype, training.mixed_precision_param} != {"float32"}
    numbers = *numbers, are_cast and is_sharded
    made_by = job_config.model.converters, job_config.compile, torch.__version__, device.type
    return repr((model_args, *numbers, *made_by))
