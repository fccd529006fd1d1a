"""The front of the model frozen in every microbatch, and its fingerprint."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime import BlockPlace, FreezingStage
from timelyfreeze.runtime.shards import whole_in_turn


@dataclass(frozen=True)
class Front:
    """A frozen front: the embedding and the first blocks."""

    depth: int  # how many blocks
    # where it ends: the stage of the first live block, and how many of its blocks belong to the
    # front
    end: BlockPlace
    names: tuple[str, ...]  # its parameters


def front_of(layout: ModelLayout, frozen: NDArray[np.bool_]) -> Front | None:
    """Return the front frozen whole by ``frozen``; None if the first block or all is live.

    None too if every tensor is frozen, with nothing to learn or save.
    """
    if frozen.all():
        return None
    depth = int(layout.layers[~frozen].min())
    if depth < 1:
        return None
    stage = int(layout.stages[layout.layers >= depth].min())
    in_front = layout.layers < depth
    here = layout.layers[in_front & (layout.stages == stage)]
    names = tuple(name for name, is_in in zip(layout.names, in_front, strict=True) if is_in)
    return Front(depth, BlockPlace(stage, len(set(here[here >= 0].tolist()))), names)


def digests(names: Sequence[str], parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of every whole tensor of ``names`` in ``parameters``.

    For a sharded tensor, a collective call; a single rank returns the digest.
    """
    here = [name for name in names if name in parameters]
    whole = ((name, whole_in_turn(parameters[name], turn)) for turn, name in enumerate(here))
    return {name: _digest(tensor) for name, tensor in whole if tensor is not None}


def fingerprint(front: Front, ranks: Sequence[Mapping[str, str]], identity: str) -> str:
    """Return a name unique to the front's weights and model.

    A front has the same name in every pipeline and sharding. ``ranks`` are all ranks'
    :func:`digests`; ``identity`` has the other influences on outputs: the architecture, types of
    numbers.
    """
    told = hashlib.blake2b(identity.encode(), digest_size=12)
    for name in sorted(front.names):  # a cut within a block changes their order
        of_replicas = sorted({digests[name] for digests in ranks if name in digests})
        if not of_replicas:
            raise ValueError(f"no rank has {name!r} of the frozen front")
        told.update(f"\n{name} {' '.join(of_replicas)}".encode())
    return f"depth_{front.depth}_{told.hexdigest()}"


def token_digest(tokens: Tensor) -> str:
    """Return a digest of a row's tokens, int64, shape [T], without a wait for the host."""
    return hashlib.blake2b(tokens.contiguous().cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _digest(tensor: Tensor) -> str:
    data = tensor.to("cpu").contiguous()
    told = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=12)
    told.update(memoryview(data.flatten().view(torch.uint8).numpy()))
    return told.hexdigest()


def check_blocks(stages: Sequence[FreezingStage], layout: ModelLayout) -> None:
    """Refuse stages without blocks to begin at, with blocks without a number, or with dropout."""
    for stage in stages:
        n_blocks = stage.blocks.n_blocks
        layers = layout.layers[layout.of_stage(stage.stage_index)]
        n_told = len(np.unique(layers[(layers >= 0) & (layers < layout.n_layers)]))
        if n_blocks != n_told:
            raise ValueError(
                f"stage {stage.stage_index} has {n_blocks} blocks, and names of its parameters "
                f"have {n_told} different numbers; the activation cache needs a number for each "
                "block, and no other"
            )
        for name, module in stage.submod.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0.0:
                raise ValueError(
                    f"{name} of stage {stage.stage_index} is Dropout with p = {module.p}; the "
                    "activation cache needs outputs that come again: set p to 0.0"
                )
