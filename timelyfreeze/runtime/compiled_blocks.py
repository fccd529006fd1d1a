"""Compiled blocks of a stage: which there are, and how one runs without its weight gradients.

A compiled block is one node of the autograd graph. Its backward computes the gradients of all
inputs that required one when the forward ran, whichever of them are asked for. So a block that is
frozen in a microbatch has to run that microbatch's *forward* with parameters that require none. The
compiler guards on it, hence keeps two variants of the code, with and without weight gradients, and
shares both among all blocks of a shape.

This is the one place that changes ``requires_grad``: between the moment a frozen block is entered,
when FSDP has gathered its parameters, and the moment it is left. Nobody else looks at it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo import OptimizedModule


class CompiledBlocks:
    """The modules inside a stage's module that ``torch.compile`` was applied to.

    Call this after parallelisms have been applied: FSDP's hooks have to run before the ones that
    are put on the blocks here.

    Args:
        module: The stage's module.

    Attributes:
        positions: For each block with parameters, where they stand among those of ``module``.
    """

    def __init__(self, module: nn.Module) -> None:
        position = {id(p): i for i, p in enumerate(module.parameters())}
        blocks = [b for b in module.modules() if isinstance(b, OptimizedModule)]
        self._blocks = [b for b in blocks if any(True for _ in b.parameters())]
        self.positions = tuple(
            tuple(position[id(p)] for p in block.parameters()) for block in self._blocks
        )
        self._frozen: frozenset[nn.Module] = frozenset()
        self._hidden: list[Tensor] = []
        for block in self._blocks:
            block.register_forward_pre_hook(self._hide)
            block.register_forward_hook(self._show)

    @contextmanager
    def without_weight_gradients(self, mask: NDArray[np.bool_] | None) -> Iterator[None]:
        """Run the stage's forward such that the blocks that ``mask`` freezes have no dW.

        Args:
            mask: Over the parameters of the module, bool; True throughout a frozen block. None
                freezes nothing.
        """
        if mask is not None:
            pairs = zip(self._blocks, self.positions, strict=True)
            self._frozen = frozenset(b for b, where in pairs if mask[list(where)].all())
        try:
            yield
        finally:
            self._frozen = frozenset()
            self._show()

    def _hide(self, block: nn.Module, inputs: Any) -> None:
        # Without gradients at all, a third variant would be compiled for nothing.
        if block in self._frozen and torch.is_grad_enabled():
            self._hidden = [p for p in block.parameters() if p.requires_grad]
            for parameter in self._hidden:
                parameter.requires_grad_(False)

    def _show(self, *hook_arguments: Any) -> None:
        for parameter in self._hidden:
            parameter.requires_grad_(True)
        self._hidden = []
