"""TorchTitan 0.3 on a machine without an accelerator, as far as the tests of the recipe need it.

Usage: torchrun ... tests/examples/titan_on_cpu.py ARGUMENTS of torchtitan.train

Upstream takes any machine for one with an accelerator, and its only attention for language models
on a CPU, FlexAttention, has no backward there ("FlexAttention does not support backward on CPU").
Here the same attention is computed with a dense mask.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

sys.path[:0] = [os.path.join(os.getcwd(), "examples")]
torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: "cpu"
for name, answer in {
    "current_device": lambda: 0,  # upstream hands it to a barrier
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**34),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
}.items():
    setattr(torch.cpu, name, answer)

from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None, **_: Any
) -> tuple[Tensor, None]:
    """Attend with the mask written out; q, k and v have shape [rows, heads, T, width]."""
    n_rows, _, n_tokens, _ = q.shape
    mask = create_mask(block_mask.mask_mod, n_rows, None, n_tokens, n_tokens, device="cpu")
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return attended, None


FlexAttention.compiled_flex_attn = staticmethod(attend)

if __name__ == "__main__":
    from torchtitan.train import main

    main()
