"""The parts of a step, each of which follows one subject through the steps of a run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.runtime.entering.stage import BatchEntry
from timelyfreeze.schedule import Action
from timelyfreeze.settings import Phase, Step
from timelyfreeze.timing import BatchRecord, Pattern

_UNREAD = BatchRecord({}, 0.0, {})
# Frozen tensors, bool, by stage and microbatch; missing ones froze nothing.
Masks = Mapping[int, Mapping[int, NDArray[np.bool_]]]


@dataclass(frozen=True)
class ObservedBatch:
    """One pass as a rank saw it, for whoever looks on; without times until they are read."""

    step: int  # optimizer step it was part of
    phase: Phase  # what the step was for
    is_cold: bool  # whether it is one of the first batches after a change of phase or of plan
    record: BatchRecord = _UNREAD  # times of the rank's actions
    # frozen fraction of elements of each of the rank's backwards that computes weight gradients
    fractions: Mapping[Action, float] = field(default_factory=dict)
    # those of them that computed no input gradient, because nobody needed it
    cut: Collection[Action] = ()
    # stage in which it began, with what the frozen front had put out before; None if at the front
    entry_stage: int | None = None
    # metrics of the policy's decision that held; empty without a policy
    policy: Mapping[str, float] = field(default_factory=dict)
    pattern: Pattern | None = None  # what it froze, if it was a batch of monitoring


class StepPart:
    """A part of a step; a method does nothing unless the part says otherwise.

    The order of a list of parts is a rule. They begin a step, and see its batches, in this order,
    and end it in the opposite one, so that a part that another one needs begins before it.
    """

    name: ClassVar[str]  # tells parts of ranks apart
    prefix: ClassVar[str] = ""  # of the names of its tensors in a checkpoint, with a point

    def begin_step(self, step: Step) -> None:
        """Enter a step."""

    def entry(self, number: int) -> BatchEntry | None:
        """Return where batch ``number`` of the step, from 0, enters; None for the model's front."""

    def end_batch(self, number: int, masks: Masks) -> None:
        """Leave batch ``number`` of the step; its gradients are there."""

    def read(self, observed: ObservedBatch) -> None:
        """Take note of a batch, of this step or an earlier one, as its times are read."""

    def needs_times(self, step: Step) -> bool:
        """Return whether all batches have to be read before the part ends the step."""
        return False

    def end_step(self, step: Step) -> None:
        """Leave the step, after its optimizer; gradients are still there."""

    def collect(self, gradient_scale: float | None) -> Mapping[str, Any]:
        """Return fields of ``RankMetrics``: measurements since the last call.

        ``gradient_scale`` undoes clipping of the step's gradients; None to measure none.
        """
        return {}

    def close(self) -> None:
        """End what still runs in the background."""

    def plain_state(self) -> Mapping[str, Any]:
        """Return plain data for a checkpoint; ``control.state.KINDS`` has a rule for each name."""
        return {}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the data of all parts, of this process or of others."""

    def tensor_state(self) -> Mapping[str, Tensor]:
        """Return tensors for a checkpoint."""
        return {}

    def tensors_to_load(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Return room for tensors of a checkpoint that has those of ``names``."""
        return {name: tensor for name, tensor in self.tensor_state().items() if name in names}

    def load_tensor_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from tensors, after :meth:`load_plain_state`."""
