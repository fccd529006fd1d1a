"""Where a training process keeps what the frozen front puts out, and what that depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from timelyfreeze.control.caching import ActivationStore, EntryFolder
from timelyfreeze.settings import GIB
from torchtitan.freezing.config import JobConfig, cache_folder


def front_store(job_config: JobConfig, rank: int) -> ActivationStore:
    """Return the store of a process, as ``[freezing.cache]`` wants it."""
    cache, folder = job_config.freezing.cache, None
    if cache.disk_gib > 0.0:
        place, room = Path(cache_folder(job_config)), int(cache.disk_gib * GIB)
        folder = EntryFolder(place, rank, room)
    return ActivationStore(int(cache.memory_gib * GIB), folder)


def front_identity(job_config: JobConfig, model_args: Any, device: torch.device) -> str:
    """Return what the front's output depends on besides its weights and a row's tokens."""
    training = job_config.training
    numbers = training.dtype, training.mixed_precision_param, torch.get_default_dtype()
    made_by = job_config.model.converters, job_config.compile, torch.__version__, device.type
    return repr((model_args, *numbers, *made_by))
