"""A pipeline stage whose frozen weights get the part of their gradient that lies in a subspace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.runtime.entering.stage import EnteringStage
from timelyfreeze.runtime.low_rank.layers import LowRankLayers


class LowRankStage(EnteringStage):
    """Pipeline stage that keeps a subspace for each linear weight, if it was prepared for it.

    Only those weights can be frozen then: norms, biases and embeddings cost little and have no
    product that a subspace would make cheaper.
    """

    low_rank: LowRankLayers | None = None
    parameter_names: tuple[str, ...]
    _masks: Mapping[int, NDArray[np.bool_]]

    def _prepare_low_rank(
        self, named: Sequence[tuple[str, Tensor]], *, rank: int, seed: int
    ) -> NDArray[np.bool_]:
        """Find the linear layers, parallelisms applied; return which parameters stay exact."""
        self.low_rank = None
        if rank == 0:
            return np.zeros(len(named), dtype=np.bool_)
        self.low_rank = LowRankLayers(dict(named), self.submod, rank=rank, seed=seed)
        return np.array([name not in self.low_rank.names for name, _ in named], dtype=np.bool_)

    def _low_rank_action(self, microbatch: int) -> AbstractContextManager[None]:
        """Return what an action runs in, so that layers know whether they are frozen."""
        mask = self._masks.get(microbatch) if self._active else None
        if self.low_rank is None or mask is None:
            return nullcontext()
        frozen = zip(self.parameter_names, mask, strict=True)
        return self.low_rank.action_of(
            microbatch, {name for name, is_frozen in frozen if is_frozen}
        )

    @contextmanager
    def _low_rank_backward(self, backward_type: str, microbatch: int) -> Iterator[None]:
        """Run a backward; the weight half does what the input half has put off."""
        if self.low_rank is None:
            yield
            return
        if backward_type == "weight":
            self.low_rank.catch_up(microbatch)
        half = self.low_rank.postponing() if backward_type == "input" else nullcontext()
        with self._low_rank_action(microbatch), half:
            yield

    def _masked(self, microbatch: int) -> NDArray[np.bool_] | None:
        """Return what a microbatch freezes, but for weights that no subspace reaches."""
        mask = self._masks.get(microbatch)
        if mask is None or self.low_rank is None or not self.low_rank.without_chain:
            return mask
        return mask & [name not in self.low_rank.without_chain for name in self.parameter_names]

    def _end_low_rank(self, *, last_backward: bool) -> None:
        """Complete the gradients after a batch's last backward."""
        if last_backward and self.low_rank is not None:
            self.low_rank.add_to_gradients()
