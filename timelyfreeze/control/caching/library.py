"""The cache as a trainer of one's own asks for it: checked, opened, and told from others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from timelyfreeze.control.caching.folder import folder_for
from timelyfreeze.control.caching.store import ActivationStore
from timelyfreeze.files import write_obstacle
from timelyfreeze.policies import FreezePolicy
from timelyfreeze.settings import GIB, ActivationCache


def cache_errors(
    cache: ActivationCache, method: str | FreezePolicy, *, plans: bool
) -> Iterator[str]:
    """Yield why outputs of a frozen front cannot be kept, or not as asked."""
    yield from cache.errors()
    if plans:
        yield (
            f"cache is given, and method is {method!r}, whose plan freezes other tensors in each "
            "microbatch; it must be a policy without a plan"
        )
    obstacle = write_obstacle(Path(cache.folder)) if cache.disk_gib > 0.0 and cache.folder else None
    if obstacle:
        yield f"cache.folder is {cache.folder!r}, and {obstacle}; name another folder"


@contextmanager
def opened(cache: ActivationCache | None) -> Iterator[ActivationStore | None]:
    """Open this process's store, and close it again if what it is opened for fails.

    Raises:
        FolderInUseError: If another run uses the folder.
    """
    if cache is None:
        yield None
        return
    folder = folder_for(Path(cache.folder), dist.get_rank(), cache.disk_gib)
    store = ActivationStore(int(cache.memory_gib * GIB), folder)
    try:
        yield store
    except BaseException:
        store.close()
        raise


def front_identity(cache: ActivationCache | None, device: torch.device) -> str:
    """Return what a front's output depends on besides its weights and a row's tokens."""
    named = "" if cache is None else cache.identity
    return repr((named, torch.get_default_dtype(), torch.__version__, device.type))
