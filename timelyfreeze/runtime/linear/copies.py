"""Copies of weights and bases in other types, made once for all microbatches of a batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Copies by name: kept while their sources stay the same, else made at each call."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self._kept: dict[str, Any] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep copies made inside, up to the end of the outermost such context."""
        if self.keeps:
            yield
            return
        self.keeps = True
        try:
            yield
        finally:
            self.keeps = False
            self.forget()

    def forget(self) -> None:
        """Let go of all copies."""
        self._kept.clear()

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the copy of this name, made if missing."""
        copy = self._kept.get(name)
        if copy is None:
            copy = make()
            if self.keeps:
                self._kept[name] = copy
        return copy

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a type; itself if of this type."""
        if tensor.dtype == dtype:
            return tensor
        copy: Tensor = self.get(f"{name} {dtype}", lambda: tensor.to(dtype))
        return copy
