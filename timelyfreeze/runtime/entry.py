"""Where a batch enters the model: at its first block, or behind a frozen front.

What a frozen front puts out for a row never changes. Where it is known, the batch begins at the
first live block: stages in front of it neither compute nor send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

LAYERS, EMBEDDING = "layers", "tok_embeddings"

# Called with a microbatch and what entered a block in it, shape [rows, T, d].
Tap = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class BatchEntry:
    """How the coming batch runs through a stage that a frozen front reaches.

    Attributes:
        stage: The stage that holds the first live block.
        n_blocks: How many of that stage's blocks lie in front of it.
        cuts: Whether the batch begins at that block.
        inputs: By microbatch, what it gets then, shape [rows, T, d]; empty on processes that do not
            hold the stage.
        tap: Told what it gets in a batch that begins at the front; None for nobody.
    """

    stage: int
    n_blocks: int
    cuts: bool = False
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    tap: Tap | None = None

    def passes_by(self, stage: int) -> bool:
        """Return whether the batch begins behind ``stage``."""
        return self.cuts and stage < self.stage

    def begins_at(self, stage: int) -> bool:
        """Return whether the batch begins inside ``stage``, or at its first block."""
        return self.cuts and stage == self.stage


class StageBlocks:
    """The transformer blocks of a stage's module, of which a forward can leave out the first.

    TorchTitan's models run through the blocks in ``layers``, and look up tokens where
    ``tok_embeddings`` is not None: that is how it cuts them into stages, and how a stage is cut
    here for the length of a forward.

    Args:
        module: The stage's module.

    Raises:
        ValueError: If it has no ``layers``.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = getattr(module, LAYERS, None)
        if not isinstance(layers, nn.ModuleDict):
            raise ValueError(
                f"the activation cache needs a model whose blocks are in an nn.ModuleDict "
                f"{LAYERS!r}; {type(module).__name__} has none"
            )
        self._module = module
        self._layers = layers

    @contextmanager
    def without_first(self, n_blocks: int) -> Iterator[None]:
        """Have the module begin behind its embedding and its first ``n_blocks`` blocks."""
        behind = list(self._layers.items())[n_blocks:]
        embedding = getattr(self._module, EMBEDDING, None)
        with self._replaced(nn.ModuleDict(behind)):
            if embedding is not None:
                setattr(self._module, EMBEDDING, None)
            try:
                yield
            finally:
                if embedding is not None:
                    setattr(self._module, EMBEDDING, embedding)

    @contextmanager
    def tapped(self, n_blocks: int, tell: Callable[[Tensor], None]) -> Iterator[None]:
        """Call ``tell`` with what comes out of the first ``n_blocks`` blocks."""
        blocks = list(self._layers.items())
        blocks.insert(n_blocks, ("tap", _Tap(tell)))
        with self._replaced(nn.ModuleDict(blocks)):
            yield

    @contextmanager
    def _replaced(self, layers: nn.ModuleDict) -> Iterator[None]:
        setattr(self._module, LAYERS, layers)
        try:
            yield
        finally:
            setattr(self._module, LAYERS, self._layers)


class _Tap(nn.Module):
    """A block that changes nothing."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._tell(hidden)
        return hidden
