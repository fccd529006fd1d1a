"""How many bytes the forward of a microbatch leaves behind for its backward.

Upstream's own modules run on fake tensors, which have shapes and no data, and every tensor that
autograd keeps is counted once by its storage. Two kernels of a GPU are stood in for by functions
that keep what those keep: attention its inputs, its output and a number per row and head, RMSNorm
its input and a number per row. What a CPU computes in their place keeps more.

The casts of weights that autocast makes are not counted: all microbatches share them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.llama3.model.args import TransformerModelArgs

from torchtitan.hf.adapter import Decoder, as_decoder
from torchtitan.upstream.fixes import one_cast_for_all


@dataclass(frozen=True)
class ModuleBytes:
    """What the parts of a model keep for the backward of one microbatch.

    Attributes:
        block: A transformer block, its input included.
        recomputed: A block that runs again in the backward, while it does; 0 if none does.
        head: The last norm, the output layer and the loss, logits included.
        tokens: Token ids of the first stage.
        hidden: The tensor that a stage sends to the next.
        logits: The logits in float32, as the loss takes them.
        block_linear_outputs: Output gradients of a block's linear layers, which a split backward
            keeps between its two halves.
        head_linear_outputs: The same of the output layer.
    """

    block: int
    recomputed: int
    head: int
    tokens: int
    hidden: int
    logits: int
    block_linear_outputs: int
    head_linear_outputs: int


def module_bytes(
    args: TransformerModelArgs,
    *,
    n_rows: int,
    seq_len: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    recompute: bool,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> ModuleBytes:
    """Count what the parts of a llama3 model keep in one microbatch.

    Args:
        args: The model.
        n_rows: Sequences of a microbatch.
        seq_len: Tokens of a sequence.
        dtype: Type of the parameters.
        autocast: Type that stages compute in under autocast; None without autocast.
        recompute: Whether blocks keep their input alone and run again in the backward.
        prepare: Freezes weights for good, and puts others beside them.
    """
    n_tokens = n_rows * seq_len
    compute = autocast or dtype
    casting = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    # Other kinds of attention keep what fused attention keeps, and need masks to run.
    one = replace(as_decoder(args), n_layers=1, max_seq_len=seq_len, attn_type="sdpa")
    with torch.device("meta"), titan_tools.set_default_dtype(dtype):
        model: Any = prepare(Decoder(one))
    with FakeTensorMode(), titan_tools.set_default_dtype(dtype):
        put_on_fakes(model)
        x = torch.empty(n_rows, seq_len, args.dim, requires_grad=True)
        block = model.layers["0"]
        frequencies = torch.empty(model.freqs_cis.shape, dtype=model.freqs_cis.dtype)
        kept_by_block, out = kept_bytes(block, casting, x, frequencies, None, buffers=[frequencies])
        head = nn.Sequential(model.norm, model.output)
        labels = torch.empty(n_rows, seq_len, dtype=torch.int64)
        hidden = torch.empty_like(out, requires_grad=True)
        kept_by_head, _ = kept_bytes(
            head, casting, hidden, loss=lambda out: cross_entropy_loss(out, labels)
        )
        linear, of_head = map(_learned_outputs, (block, model.output))
    return ModuleBytes(
        block=x.nbytes if recompute else kept_by_block,
        recomputed=kept_by_block if recompute else 0,
        head=kept_by_head,
        tokens=8 * n_tokens,
        hidden=out.nbytes,
        logits=4 * n_tokens * args.vocab_size,
        block_linear_outputs=n_tokens * linear * compute.itemsize,
        head_linear_outputs=n_tokens * of_head * compute.itemsize,
    )


def _learned_outputs(module: nn.Module) -> int:
    """Return the width of what those linear layers put out whose weights are trained."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.out_features for layer in layers if layer.weight.requires_grad)


def put_on_fakes(model: nn.Module) -> None:
    """Give a model on the meta device parameters of the ``FakeTensorMode`` that is on."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.empty(old.shape, dtype=old.dtype)
            setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))


def kept_bytes(
    module: nn.Module,
    casting: AbstractContextManager[Any],
    *inputs: Any,
    buffers: list[Tensor] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> tuple[int, Tensor]:
    """Return the bytes that stay alive after a forward, parameters left out, and its output.

    Args:
        module: A part of a model, on fake tensors.
        casting: Under which it runs.
        inputs: Of its forward.
        buffers: Tensors of the model that are none of its parameters.
        loss: Of the output, if the part computes it.
    """
    _stand_in_for_kernels(module)
    known = {_key(p) for p in [*module.parameters(), *(buffers or [])]}
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
    own = {_key(t) for t in inputs if isinstance(t, Tensor)}
    casts = (of_first.keys() & alive.keys()) - own
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
        return _KeepForNorm.apply(x, self.weight)


class _KeepForNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _FusedAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return _KeepForAttention.apply(q, k, v)


class _KeepForAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, width = q.shape
        # Laid out as the kernels do, so that putting the heads side by side copies nothing.
        out = v.new_empty(batch, length, heads, width).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out
