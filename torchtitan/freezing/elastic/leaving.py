"""What makes a trainer end before a step, so that another one can go on from there."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.distributed import ParallelDims
from torchtitan.train import Trainer

from timelyfreeze.control import FreezeController
from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.freezing.config import JobConfig

Leaves = Callable[[FreezeController], bool]
KnownDims = dict[tuple[int, int, int], ParallelDims]


class _Left(BaseException):
    """The run goes on elsewhere. No ``Exception``: nobody on the way may report it as an error."""


class Leaving(Trainer):
    """Of a trainer of a part of a run the first base; the second is ``FreezingTrainer``.

    Args:
        job_config: What to train, and how.
        leaves: Asked before each step, on all ranks alike, whether to end here.
        dims: Those of the trainers before, by degrees; takes this one's up.
    """

    def __init__(self, job_config: JobConfig, leaves: Leaves, dims: KnownDims) -> None:
        self._leaves = leaves
        self._known_dims = dims
        super().__init__(job_config)

    def init_distributed(self) -> ParallelDims:
        """Return dimensions, with the meshes of a former trainer that has the same.

        Meshes of the same ranks and names are equal, and torch's caches would go on with the
        process groups of the first of them.
        """
        found = super().init_distributed()
        return self._known_dims.setdefault((found.pp, found.dp_replicate, found.dp_shard), found)

    def should_continue_training(self) -> bool:
        """Return whether there is another step; leave if it is another trainer's."""
        goes_on = super().should_continue_training()
        if goes_on and self.controller is not None and self._leaves(self.controller):
            raise _Left
        return goes_on

    def train(self) -> None:
        """Train to the end of the run, or until it goes on elsewhere."""
        try:
            super().train()
        except _Left:
            self.metrics_processor.end_run(f"goes on in another pipeline after step {self.step}")

    def hand_over(self) -> tuple[MemoryCheckpoint, int]:
        """Close; return what the run goes on from, and a signal to stop that came late, or 0."""
        memory = self._manager.hand_over(self.device)
        heard = 0 if self._stop is None else self._stop.heard
        self.close()
        return memory, heard

    def take_over(self, memory: MemoryCheckpoint, heard: int) -> None:
        """Go on from what another trainer has handed over."""
        self._manager.take_over(memory)
        if self._stop is not None:
            self._stop.heard = heard

    @property
    def _manager(self) -> SafeCheckpointManager:
        assert isinstance(self.checkpointer, SafeCheckpointManager)  # upstream's is replaced
        return self.checkpointer


def leaving(trainer: type[Trainer]) -> type[Leaving]:
    """Return ``FreezingTrainer``, or what stands in its place, as a trainer that may leave."""
    return type("LeavingTrainer", (Leaving, trainer), {})
