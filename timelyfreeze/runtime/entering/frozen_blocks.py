"""The first blocks of a stage, run without a graph where they are frozen and nothing is in front.

Their activations are then not kept: nobody goes back through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import nn, no_grad

from timelyfreeze.runtime.entering.entry import EMBEDDING, LAYERS


class FrozenBlocks:
    """The blocks of a stage's module, of which the first ones may be frozen.

    Args:
        module: The stage's module; without blocks in ``layers`` nothing is ever run otherwise.
        names: Of its parameters, in the order of masks.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        layers = getattr(module, LAYERS, None)
        embedding = getattr(module, EMBEDDING, None)
        self._blocks: list[tuple[nn.Module, NDArray[np.intp]]] = []
        if not isinstance(layers, nn.ModuleDict):
            return
        parts = [] if embedding is None else [(f"{EMBEDDING}.", embedding)]
        parts += [(f"{LAYERS}.{name}.", block) for name, block in layers.items()]
        for prefix, part in parts:
            own = np.flatnonzero([name.startswith(prefix) for name in names])
            self._blocks.append((part, own))

    def first(self, mask: NDArray[np.bool_]) -> list[nn.Module]:
        """Return the embedding and the blocks in front of the first live tensor of them.

        Args:
            mask: What is frozen, shape [n_parameters].
        """
        found = []
        for block, own in self._blocks:
            if not mask[own].all():
                break
            found.append(block)
        return found

    @contextmanager
    def without_graph(self, mask: NDArray[np.bool_]) -> Iterator[None]:
        """Run the module's frozen first blocks so that they keep nothing for a backward."""
        with ExitStack() as restored:
            for block in self.first(mask):
                own = vars(block).get("forward")  # what is not a method of its class
                block.forward = no_grad()(block.forward)
                restored.callback(_restore, block, own)
            yield


def _restore(block: nn.Module, forward: object) -> None:
    del block.forward
    if forward is not None:
        vars(block)["forward"] = forward
