"""Observations of a policy with comparisons: losses, the learning rate, and plasticity.

Every rank counts its losses. The rank with the compared blocks, the first of several, captures a
microbatch at a check and has a reference compare it. Ranks exchange observations at checks, and
only there: so all decide the same, and nobody waits for a slow comparison.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from timelyfreeze.policies import Compared, ModelLayout, Observed, ReferenceSettings
from timelyfreeze.policies.policy import BACKGROUND
from timelyfreeze.runtime import FreezingStage
from timelyfreeze.runtime.reference import Reference
from timelyfreeze.runtime.reference.capture import (
    Capture,
    StageBlock,
    check_importable,
    plain_copy,
    stage_blocks,
)
from timelyfreeze.runtime.shards import as_sharded, local_part

_COPY = "copy."


@dataclass(eq=False)
class OutputComparator:
    """A rank's part of comparing outputs."""

    layout: ModelLayout  # tensors of all ranks
    stages: Sequence[FreezingStage]  # those of this rank
    evaluated: Collection[int]  # which of them it evaluates; of ranks that hold the same, one does
    settings: ReferenceSettings  # what the policy wants
    reference: Reference  # compares
    learning_rate: Callable[[], float] | None = None  # of the step to come

    def __post_init__(self) -> None:
        """Find the blocks, and listen to losses."""
        self._blocks = stage_blocks(self.layout, self.stages)
        if self.settings.place == BACKGROUND:
            check_importable(self._blocks)
        blocks = self._blocks.values()
        self._parameters = {name: p for block in blocks for name, p in block.parameters.items()}
        self._loss = torch.zeros((), dtype=torch.float64)  # sum over the steps since the last check
        self._n_steps = 0
        self._listens = False
        self._last = next((stage for stage in self.stages if stage.is_last), None)
        if self._last is not None:
            self._loss = self._loss.to(self._last.device)
            self._last.on_loss = self._add_loss
        self._compared: Compared | None = None
        self._copied: int | None = None  # number of the copy that there is
        self._copy: dict[str, Tensor] = {}  # its weights: what this rank has of them
        self._capture: Capture | None = None
        self._n_tokens: Tensor | None = None
        self._rate: float | None = None
        self._n_dropped = 0

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self, step: int, *, counts: bool, is_due: bool) -> None:
        """Enter a step.

        The loss of a step ``counts`` if the step changes weights as training; where a check
        ``is_due`` at the end, the first batch is compared.
        """
        self._listens = counts
        self._n_steps += counts
        self._n_tokens = None
        if not is_due:
            return
        self._rate = None if self.learning_rate is None else self.learning_rate()
        if self._compared is None:
            return
        self._make_copy(self._compared)
        blocks = self._own(self._compared)
        if not blocks or blocks[0].stage.stage_index not in self.evaluated:
            return
        if is_busy(self.settings, blocks[0].stage.device):
            self._n_dropped += 1
            return
        self._capture = Capture(
            blocks[0].stage,
            [block.module for block in blocks],
            step=step,
            first=self._compared.first,
            max_tokens=self.settings.max_tokens,
            n_tokens=lambda: None if self._n_tokens is None else self._n_tokens.tolist(),
        )

    def record_tokens(self, n_tokens: Tensor) -> None:
        """Note the numbers of tokens before the padding by row of a batch, int, shape [B].

        Tokens stand at the beginning of rows. The first note of a step counts.
        """
        if self._n_tokens is None:
            self._n_tokens = n_tokens

    def end_step(self) -> None:
        """Hand over the captured batch."""
        capture, self._capture = self._capture, None
        if capture is None:
            return
        capture.remove()
        if capture.batch is None or not self.reference.offer(capture.batch):
            self._n_dropped += 1

    def _add_loss(self, loss: Tensor) -> None:
        if self._listens:
            self._loss.add_(local_part(loss))

    # -- the check ---------------------------------------------------------------------------------

    def take(self) -> Observed:
        """Return this rank's observations since the last call."""
        found, n_lost = self.reference.take()
        has_loss = self._last is not None and self._n_steps > 0
        loss = float(self._loss) / self._n_steps if has_loss else None
        seen = Observed(loss, self._rate, tuple(sorted(found)), self._n_dropped + n_lost)
        self._n_dropped = self._n_steps = 0
        self._loss.zero_()
        return seen

    def follow(self, compared: Compared | None) -> None:
        """Compare these blocks from now on; a collective call of their ranks."""
        self._compared = compared
        if compared is None:
            self._copied, self._copy = None, {}
        else:
            self._make_copy(compared)

    def _own(self, compared: Compared) -> list[StageBlock]:
        """Return the compared blocks, if they are here."""
        layers = range(compared.first, compared.end)
        return [self._blocks[layer] for layer in layers if layer in self._blocks]

    def _make_copy(self, compared: Compared) -> None:
        """Have the reference be a copy of the weights as they are now, or as they were saved."""
        if self._copied == compared.copy:
            return
        blocks, saved = self._own(compared), self._copy if self._copied is None else {}
        self._copied, self._copy = compared.copy, {}
        copies = []
        for block in blocks:
            whole = {}
            for name, parameter in block.parameters.items():
                part = saved.get(name, local_part(parameter)).to("cpu", copy=True)
                self._copy[name] = part
                # Whoever holds a shard takes part, whoever evaluates keeps the whole.
                full = as_sharded(part, parameter)
                if isinstance(full, DTensor):
                    full = full.full_tensor().cpu()
                whole[name.removeprefix(block.prefix)] = full
            if block.stage.stage_index in self.evaluated:
                copies.append(plain_copy(block.module, whole))
        if copies:
            self.reference.load(nn.ModuleList(copies))

    def close(self) -> None:
        """End the reference."""
        self.reference.close()

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_losses(self) -> dict[str, list[float]]:
        """Return {last stage, if here: sum and number of this interval's losses}."""
        here = () if self._last is None else (str(self._last.stage_index),)
        return {stage: [float(self._loss), self._n_steps] for stage in here}

    def resume(
        self, compared: Compared | None, losses: Mapping[str, Sequence[float]] | None
    ) -> None:
        """Resume the comparison, and :meth:`plain_losses`; the copy needs weights."""
        self._compared, self._copied, self._copy = compared, None, {}
        if losses is not None and self._last is not None:
            total, n_steps = losses[str(self._last.stage_index)]
            self._loss.fill_(total)
            self._n_steps = int(n_steps)

    def tensor_state(self) -> dict[str, Tensor]:
        """Return the weights of the copy, sharded as the parameters are."""
        return {
            f"{_COPY}{name}": as_sharded(part, self._parameters[name])
            for name, part in self._copy.items()
        }

    def tensors_to_load(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return room for the weights of this rank's blocks among ``names``."""
        return {
            f"{_COPY}{name}": as_sharded(torch.empty_like(local_part(p), device="cpu"), p)
            for name, p in self._parameters.items()
            if f"{_COPY}{name}" in names
        }

    def load_tensor_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of :meth:`tensor_state`, after :meth:`resume`."""
        self._copy = {
            name.removeprefix(_COPY): local_part(tensor).to("cpu", copy=True)
            for name, tensor in tensors.items()
            if name.startswith(_COPY)
        }


def is_busy(settings: ReferenceSettings, device: torch.device) -> bool:
    """Return whether the machine is too busy to compare outputs.

    A machine training itself always is; then the process gives way by its priority. Inline, a run
    is to be repeated exactly, on a busy machine too.
    """
    if device.type == "cpu" or settings.place != BACKGROUND:
        return False
    return os.getloadavg()[0] / (os.cpu_count() or 1) > settings.max_cpu_load
