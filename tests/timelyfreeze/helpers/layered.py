"""A model with an embedding, numbered blocks and a head, cut into stages, for what tells blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.stages import VOCABULARY, WIDTH

# With a width that is odd some processors give a row another last bit in another place of a batch.
EVEN_WIDTH = 8


class Layer(nn.Module):
    """A residual block that is called with a scale besides its input, as blocks are with tables."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("shift", torch.full((width,), 0.25), persistent=False)

    def forward(self, hidden: Tensor, scale: Tensor, *, mask: Tensor | None = None) -> Tensor:
        moved = self.tied(torch.tanh(self.up(hidden) * scale + self.shift))
        return hidden + (moved if mask is None else moved * mask)


class Part(nn.Module):
    """One stage: the blocks with these numbers, the embedding before 0, the head where it ends."""

    def __init__(self, numbers: range, *, is_last: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if numbers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): Layer(width) for number in numbers})
        self.head = nn.Linear(width, VOCABULARY) if is_last else None
        self.scale = torch.tensor([1.5])

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.scale, mask=None)
        return hidden if self.head is None else self.head(hidden)


def make_parts(
    n_stages: int = 4, per_stage: int = 1, seed: int = 0, width: int = WIDTH
) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [
        Part(range(i * per_stage, (i + 1) * per_stage), is_last=i == n_stages - 1, width=width)
        for i in range(n_stages)
    ]
