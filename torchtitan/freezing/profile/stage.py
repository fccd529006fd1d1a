"""One stage of a pipeline, run alone on made-up neighbours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from timelyfreeze.masks import ParameterTable, build_parameter_table
from timelyfreeze.runtime import (
    NOTHING_FROZEN,
    ActionRecorder,
    Clock,
    FreezingStage,
    clock_for,
    run_batches_in,
)
from timelyfreeze.schedule import ActionKind
from torchtitan.upstream.fixes import PipelineLoss

_MICROBATCH = 0  # each batch has one


@dataclass(frozen=True)
class Microbatch:
    """What goes into the pipeline, and the shape of what travels between stages.

    Attributes:
        tokens: Token ids, shape [sequences, tokens of a sequence].
        labels: Target ids, of the same shape.
        width: Last dimension of what one stage sends to the next.
        dtype: Its type.
    """

    tokens: Tensor
    labels: Tensor
    width: int
    dtype: torch.dtype


def profile_clock(device: torch.device) -> Clock:
    """Return the clock of a training run; on a CPU and with one thread that of processor time.

    So other processes of the machine do not count, as where ranks of a training run share cores.
    """
    return clock_for(device, lone=torch.get_num_threads() == 1)


class LoneStage:
    """A stage between stand-ins for its neighbours.

    Needs a process group of one rank. Gradients are kept from one batch to the next, as one of many
    microbatches adds them up.

    Args:
        module: The stage's piece of the model, on its device.
        microbatch: What it works on.
        loss_fn: Sum loss, for the last stage.
        is_first: Whether the stage takes tokens.
        is_last: Whether it computes the loss.
    """

    def __init__(
        self,
        module: nn.Module,
        microbatch: Microbatch,
        loss_fn: Callable[..., Tensor],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        device = microbatch.tokens.device
        modules: list[nn.Module] = [module]
        if not is_first:
            modules.insert(0, _Neighbour(microbatch, is_first=True))
        if not is_last:
            modules.append(_Neighbour(microbatch, is_first=False))
        place = modules.index(module)
        self._microbatch = microbatch
        self._recorder = ActionRecorder(profile_clock(device))
        self.stage = FreezingStage(module, place, len(modules), device)
        self._stages = [
            self.stage if other is module else PipelineStage(other, i, len(modules), device)
            for i, other in enumerate(modules)
        ]
        self._loss = PipelineLoss(loss_fn if is_last else _sum)
        self._schedules: dict[bool, Any] = {}
        self.table = self.attach(per_tensor=False)
        self._times_loss = is_last

    def attach(self, *, per_tensor: bool) -> ParameterTable:
        """Attach clocks and masks, once more for a first stage that shall keep its chain."""
        self.stage.attach(self._recorder, per_tensor=per_tensor)
        sizes = self.stage.parameter_sizes.tolist()
        return build_parameter_table(zip(self.stage.parameter_names, sizes, strict=True))

    def run(self, mask: NDArray[np.bool_], *, split: bool) -> float:
        """Run one microbatch forward and backward.

        Args:
            mask: What to freeze, shape [n], in the order of ``table``.
            split: Whether the backward comes in two halves.

        Returns:
            float: The fraction of the stage's elements that was frozen.
        """
        self.stage.freeze({_MICROBATCH: mask} if mask.any() else NOTHING_FROZEN)
        schedule = self._schedule(split)
        tokens, labels = self._microbatch.tokens, self._microbatch.labels
        with self._loss.divided_by(labels.numel()):
            schedule.step(tokens, target=labels, losses=[], return_outputs=False)
        self.stage.freeze_nothing()
        return self.stage.applied_ratios[_MICROBATCH]

    def take_times(self) -> list[dict[ActionKind, float]]:
        """Wait for the device and hand out the batches since the last call, oldest first.

        Returns:
            Milliseconds of the stage's actions by kind, for each batch.
        """
        return [
            {action.kind: duration_ms for action, duration_ms in record.durations_ms.items()}
            for record in self._recorder.drain()
        ]

    def _schedule(self, split: bool) -> Any:
        if split not in self._schedules:
            schedule = ScheduleInterleavedZeroBubble if split else ScheduleInterleaved1F1B
            self._schedules[split] = schedule(
                self._stages, n_microbatches=1, loss_fn=self._loss, scale_grads=False
            )
            timed = self._recorder.measure_more if self._times_loss else nullcontext
            run_batches_in(self._schedules[split], self._recorder.recorded_batch, timed)
        return self._schedules[split]


class _Neighbour(nn.Module):
    """Sends noise of the shape that stages send, or, as the last stage, gets such a gradient."""

    def __init__(self, microbatch: Microbatch, *, is_first: bool) -> None:
        super().__init__()
        tokens, kind = microbatch.tokens, {"dtype": microbatch.dtype}
        self._is_first = is_first
        self.scale = nn.Parameter(torch.ones((), device=tokens.device, **kind))
        noise = torch.randn(*tokens.shape, microbatch.width, device=tokens.device, **kind)
        self.register_buffer("noise", noise)

    def forward(self, received: Tensor) -> Tensor:
        # Whatever the tokens are, they are not looked at.
        return self.noise * self.scale if self._is_first else received * self.noise * self.scale


def _sum(output: Tensor, labels: Tensor) -> Tensor:
    return output.sum()
