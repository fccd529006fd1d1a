"""A small data set whose rows have numbers, and the batches of epochs over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.timelyfreeze.helpers.stages import VOCABULARY
from timelyfreeze import Row, token_digest

N_ROWS, BATCH = 24, 8


class NumberedRows:
    """Random tokens and labels, the same for the same seed."""

    def __init__(self, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.labels = (
            torch.randint(VOCABULARY, (N_ROWS, 3), generator=generator) for _ in range(2)
        )
        self._seed = seed

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.tokens[list(numbers)], self.labels[list(numbers)]

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        return [Row(number, token_digest(self.tokens[number])) for number in numbers]

    def order(self, n_epochs: int) -> list[list[int]]:
        """The rows of each batch: each epoch has all, in an order of its own."""
        generator = torch.Generator().manual_seed(self._seed + 1)
        epochs = [torch.randperm(N_ROWS, generator=generator) for _ in range(n_epochs)]
        return torch.cat(epochs).reshape(-1, BATCH).tolist()  # type: ignore[no-any-return]
