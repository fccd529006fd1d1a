"""What the parts of an image classifier take: its blocks differ, and so does what they send on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from timelyfreeze.whatif.rank_memory import BlockBytes, PartBytes
from torchtitan.freezing.memory.activations import kept_bytes, put_on_fakes
from torchtitan.vision.args import VisionArgs
from torchtitan.vision.model import VisionModel

_CAST = (nn.Linear, nn.Conv2d)


class _Head(nn.Module):
    """The last norm and the output layer, from the last block's output on."""

    def __init__(self, model: VisionModel) -> None:
        super().__init__()
        self.pool = model.model_args.library.pool
        self.norm, self.output = model.norm, model.output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.pool(hidden)))


def block_bytes(
    args: VisionArgs,
    *,
    n_pictures: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    recompute: bool,
    update_copies: int,
) -> BlockBytes:
    """Count what the parts of an image classifier keep in one microbatch.

    Args:
        args: The model, with the classes and the size of pictures of the run.
        n_pictures: Pictures of a microbatch.
        dtype: Type of the parameters.
        autocast: Type that stages compute in under autocast; None without autocast.
        recompute: Whether blocks keep their input alone and run again in the backward.
        update_copies: As ``ModelBytes`` has it.
    """
    casting = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    cast_bytes = 0 if autocast in (None, dtype) else (autocast or dtype).itemsize
    part = partial(_part, itemsize=dtype.itemsize, cast_bytes=cast_bytes)
    with torch.device("meta"), titan_tools.set_default_dtype(dtype):
        model = VisionModel(args)  # the library looks at values meanwhile, which fake tensors lack
    with FakeTensorMode(), titan_tools.set_default_dtype(dtype):
        put_on_fakes(model)
        channels = getattr(args.config(), "num_channels", 3)
        pictures = torch.empty(n_pictures, channels, args.image_size, args.image_size)
        kept, hidden = kept_bytes(model.tok_embeddings, casting, pictures)
        embedding = part(model.tok_embeddings, max(kept, pictures.nbytes), 0)
        blocks, outputs, recomputed = [], [hidden.nbytes], 0
        for block in model.layers.values():
            enters = torch.empty_like(hidden, requires_grad=True)
            between = _OutputBytes(block)
            kept, hidden = kept_bytes(block, casting, enters)
            if recompute:
                recomputed, kept = max(recomputed, kept), enters.nbytes
            blocks.append(part(block, kept, between.total))
            outputs.append(hidden.nbytes)
        labels = torch.empty(n_pictures, dtype=torch.int64)
        head, enters = _Head(model), torch.empty_like(hidden, requires_grad=True)
        between = _OutputBytes(head)
        kept, logits = kept_bytes(
            head, casting, enters, loss=lambda out: F.cross_entropy(out.float(), labels)
        )
        return BlockBytes(
            embedding=embedding,
            layer=blocks[0],
            norm=part(model.norm, 0, 0),
            head=part(model.output, kept, between.total),
            message=outputs[0],
            logits=4 * logits.numel(),
            recomputed=recomputed,
            update_copies=update_copies,
            blocks=tuple(blocks),
            outputs=tuple(outputs),
        )


class _OutputBytes:
    """Bytes that linear layers and convolutions put out in a module's first forward."""

    def __init__(self, module: nn.Module) -> None:
        self._of: dict[nn.Module, int] = {}
        for child in module.modules():
            if isinstance(child, _CAST):
                child.register_forward_hook(self._note)

    def _note(self, child: nn.Module, _: object, output: Tensor) -> None:
        self._of[child] = output.nbytes

    @property
    def total(self) -> int:
        return sum(self._of.values())


def _part(
    module: nn.Module, kept: int, between_halves: int, *, itemsize: int, cast_bytes: int
) -> PartBytes:
    sizes = [p.numel() for p in module.parameters()]
    cast = [p.numel() for m in module.modules() if isinstance(m, _CAST) for p in m.parameters()]
    return PartBytes(
        weights=sum(sizes) * itemsize,
        casts=sum(cast) * cast_bytes,
        kept=kept,
        kept_between_halves=between_halves,
        largest_weight=max(sizes) * itemsize,
    )
