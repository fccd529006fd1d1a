"""Batches come to a GPU without a wait. Run with ``scripts/gpu_checks.sh``."""

import pytest
import torch

from torchtitan.upstream.fixes import copy_without_wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_copies_from_pinned_memory_are_not_waited_for():
    tensor = torch.arange(1 << 20).pin_memory()
    copy_without_wait([tensor])
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = tensor.to(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(copy.cpu(), torch.arange(1 << 20))
