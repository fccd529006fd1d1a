"""Bytes left by a microbatch's forward for its backward.

Upstream's own modules run on fake tensors, which have shapes and no data, and every tensor kept by
autograd is counted once by its storage. Stand-ins keep the same tensors as two kernels of a GPU:
attention its inputs, its output and a number per row and head, RMSNorm its input and a number per
row; so does attention within documents. A CPU's computation keeps more, and a mask of documents is
not counted.

Autocast's casts of weights are not counted: all microbatches share them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.upstream.fixes import one_cast_for_all


def put_on_fakes(model: nn.Module) -> None:
    """Give a model on the meta device parameters of the active ``FakeTensorMode``."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.empty(old.shape, dtype=old.dtype)
            setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))


def kept_bytes(
    module: nn.Module,
    casting: AbstractContextManager[Any],
    *inputs: Any,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> tuple[int, Tensor]:
    """Return the bytes alive after a forward, and its output.

    Weights are left out, and so are all inputs but the first, shared by microbatches.
    """
    _stand_in_for_kernels(module)
    known = {_key(p) for p in [*module.parameters(), *filter(torch.is_tensor, inputs[1:])]}
    alive: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> int:
        if _key(tensor) not in known:
            # The storage is held so that its number is not given to another. A tensor would hold
            # the graph, which holds this function: a circle that is never given back.
            alive[_key(tensor)] = tensor.untyped_storage()
        return _key(tensor)

    def forward() -> Tensor:
        with casting:
            return module(*inputs)

    with one_cast_for_all(), torch.autograd.graph.saved_tensors_hooks(keep, lambda key: key):
        first = forward()
        of_first, alive = alive, {}
        out = forward()
        if loss is not None:
            keep(out)  # a stage holds on to its output until the backward
            loss(out)
    # What both microbatches keep is the input, which each has its own of, and casts of weights.
    casts = (of_first.keys() & alive.keys()) - {_key(inputs[0])}
    del first
    return sum(kept.nbytes() for key, kept in alive.items() if key not in casts), out


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# -- kernels of a GPU ------------------------------------------------------------------------------


def _stand_in_for_kernels(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.RMSNorm):
            setattr(module, name, _FusedNorm(child.weight))
        elif name == "inner_attention":
            setattr(module, name, _FusedAttention())
        else:
            _stand_in_for_kernels(child)


class _FusedNorm(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return _Keep.apply(torch.empty_like(x), x, self.weight, _number_a_row(x))


class _FusedAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        batch, heads, length, width = q.shape
        # Laid out as the kernels do, so that putting the heads side by side copies nothing.
        out = v.new_empty(batch, length, heads, width).transpose(1, 2)
        return _Keep.apply(out, q, k, v, out, _number_a_row(q))


def _number_a_row(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return out
