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


def front_identity(job_config: JobConfig, model_args: Any, device: torch.device) -> str:
    """Return what the front's output depends on besides its weights and a row's tokens."""
    training = job_config.training
    numbers = training.dtype, training.mixed_precision_param, torch.get_default_dtype()
    made_by = job_config.model.converters, job_config.compile, torch.__version__, device.type
    return repr((model_args, *numbers, *made_by))
