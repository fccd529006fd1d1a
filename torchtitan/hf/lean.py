"""A decoder's stage computing in 16 bits, from the embedding's output to the logits."""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from timelyfreeze.runtime.linear import lean_linears


def compute_in(part: nn.Module, dtype: torch.dtype) -> None:
    """Have a stage compute and send activations of a 16-bit type; its weights stay as they are.

    Rounded once behind the embedding, the residual stream takes half the memory of float32 and no
    layer casts its input. FSDP2 does the same by its policy. Norms, the softmax and the loss are
    float32 inside.
    """
    linears = lean_linears(part, dtype)
    forward = part.forward

    @wraps(forward)
    def lean_forward(*args: Any, **kwargs: Any) -> Any:
        with linears.forwarding():
            return forward(*args, **kwargs)

    part.forward = lean_forward
    if part.tok_embeddings is not None:
        part.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    for module in part.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = LeanNorm


class LeanNorm(nn.RMSNorm):
    """An RMS norm with a float32 weight and inputs of fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, in the type of x; sums are float32."""
        if torch.compiler.is_compiling():
            # One kernel, whatever the types; a cast weight would be kept for the backward.
            wide = F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)
            return wide.to(x.dtype)
        # torch has fused kernels for equal types alone.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
