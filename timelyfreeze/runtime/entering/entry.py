"""Where a batch enters the model: at its first block, or behind a frozen front.

What a frozen front puts out for a row never changes. Where it is known, the batch begins at the
first live block: stages in front of it neither compute nor send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, no_grad

LAYERS, EMBEDDING = "layers", "tok_embeddings"

# Called with a microbatch and what entered a block in it, shape [rows, T, d].
Tap = Callable[[int, Tensor], None]


class BlockPlace(NamedTuple):
    """A place in front of a block."""

    stage: int  # the stage that holds the block
    n_blocks: int  # how many of the stage's blocks lie in front of it


@dataclass(frozen=True)
class BatchEntry:
    """How the coming batch runs through a pipeline whose front is frozen."""

    start: BlockPlace | None = None  # where it begins; None for the front
    # by microbatch, what the block at ``start`` gets, shape [rows, T, d]; empty on processes that
    # do not hold its stage. Looking one up may wait for it
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    tapped: BlockPlace | None = None  # where ``tap`` listens, not before ``start``
    tap: Tap | None = None  # told what comes by there; None for nobody

    def passes_by(self, stage: int) -> bool:
        """Return whether the batch begins behind ``stage``."""
        return self.start is not None and stage < self.start.stage

    def begins_at(self, stage: int) -> bool:
        """Return whether the batch begins inside ``stage``, or at its first block."""
        return self.start is not None and stage == self.start.stage

    def wait_for(self, microbatch: int) -> None:
        """Wait until the input of a microbatch is there."""
        _ = self.inputs[microbatch]


AT_THE_FRONT = BatchEntry()


class StageBlocks:
    """The transformer blocks of a stage's module, of which a forward can leave out the first.

    TorchTitan's models run through the blocks in ``layers``, and look up tokens where
    ``tok_embeddings`` is not None: that is how it cuts them into stages, and how a stage is cut
    here for the length of a forward.
    """

    def __init__(self, module: nn.Module, layers: str = LAYERS, embedding: str = EMBEDDING) -> None:
        blocks = getattr(module, layers, None)
        if not isinstance(blocks, nn.ModuleDict):
            raise ValueError(
                f"the activation cache needs a model whose blocks are in an nn.ModuleDict "
                f"{layers!r}; {type(module).__name__} has none"
            )
        self._module = module
        self._layers = blocks
        self._names = layers, embedding

    @property
    def n_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._layers)

    @property
    def embedding(self) -> nn.Module | None:
        """The embedding; None where there is none."""
        return getattr(self._module, self._names[1], None)

    def first(self, n_blocks: int) -> set[nn.Module]:
        """Return the embedding, if it is here, the first blocks, and what they are made of."""
        parts = [self.embedding, *list(self._layers.values())[:n_blocks]]
        return {inner for part in parts if part is not None for inner in part.modules()}

    @contextmanager
    def cut(
        self, start: int | None, tapped: int | None, tell: Callable[[Tensor], None]
    ) -> Iterator[None]:
        """Run the module without what comes before a block, and listen in front of another.

        ``start`` blocks are left out, the embedding with them, and ``tell`` hears what comes by
        behind ``tapped`` blocks, not fewer; None for nothing, and for nowhere.
        """
        blocks: list[tuple[str, nn.Module]] = list(self._layers.items())
        if tapped is not None:
            blocks.insert(tapped, ("tap", _Tap(tell)))
        layers, embedding = self._names
        replaced = {layers: nn.ModuleDict(blocks[start or 0 :])}
        if start is not None:
            replaced[embedding] = None
        before = {name: getattr(self._module, name, None) for name in replaced}
        try:
            for name, part in replaced.items():
                setattr(self._module, name, part)
            yield
        finally:
            for name, part in before.items():
                setattr(self._module, name, part)


class _Tap(nn.Module):
    """A block that changes nothing."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._tell(hidden)
        return hidden


class FrozenBlocks:
    """The blocks of a stage's module, of which the first ones may be frozen.

    In a module without blocks in ``layers`` nothing is ever run otherwise.
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
        """Return the embedding and the blocks in front of the first live tensor of them."""
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
