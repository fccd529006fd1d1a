"""What policies ask and see that compare a part of the model with an older copy of it.

The copy, called the reference, is an ordinary module; a policy only says which blocks are copied
and when, and gets numbers. ``timelyfreeze.runtime.reference`` makes and runs copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from timelyfreeze.policies.layout import ModelLayout

if TYPE_CHECKING:
    from timelyfreeze.policies.policy import Decision

BACKGROUND = "background"
INLINE = "inline"
PLACES = (BACKGROUND, INLINE)
INT8 = "int8"
FLOAT32 = "float32"
PRECISIONS = (INT8, FLOAT32)


@dataclass(frozen=True)
class ReferenceSettings:
    """How a reference is made and run.

    Attributes:
        place: ``BACKGROUND``, in a process of its own that nobody waits for, or ``INLINE``, in the
            training process, which then waits.
        precision: What its linear layers compute in, one of ``PRECISIONS``.
        max_tokens: Tokens of an output that are compared, at most; 0 to compare examples.
        squared: As in :func:`timelyfreeze.policies.plasticity.similarity_loss`.
        queue_length: Comparisons that may wait for a process; more are dropped.
        max_cpu_load: Load average per core above which no comparison is begun.
    """

    place: str = BACKGROUND
    precision: str = INT8
    max_tokens: int = 256
    squared: bool = False
    queue_length: int = 2
    max_cpu_load: float = 0.5


@dataclass(frozen=True)
class Compared:
    """Blocks that are to be compared until the next check.

    Attributes:
        first: Their first layer.
        end: The layer behind their last.
        copy: Number of the copy; a new number asks for one of the weights as they are now.
    """

    first: int
    end: int
    copy: int


@dataclass(frozen=True, order=True)
class Difference:
    """What one comparison has found.

    Attributes:
        step: Step whose batch went through both.
        first: First layer of the blocks.
        value: Plasticity.
    """

    step: int
    first: int
    value: float


@dataclass(frozen=True)
class Evaluation:
    """What a decision has made of one comparison.

    Attributes:
        step: Step whose batch went through both.
        module: Number of the part of the model, from the front.
        value: Plasticity.
        smoothed: Its moving mean.
    """

    step: int
    module: int
    value: float
    smoothed: float


@dataclass(frozen=True)
class Observed:
    """What a rank, or all of them together, have seen since the check before.

    Attributes:
        loss: Mean over the steps that count; None if nobody has seen one.
        learning_rate: Of the step of the check; None if nobody knows it.
        differences: What comparisons have found, oldest first. One may arrive checks later.
        dropped: Comparisons that were left out: no room, a busy machine, a process that died.
    """

    loss: float | None
    learning_rate: float | None
    differences: tuple[Difference, ...] = ()
    dropped: int = 0


def together(ranks: Sequence[Observed]) -> Observed:
    """Put together what the ranks have seen: the mean loss of all that have one."""
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    rates = [rank.learning_rate for rank in ranks if rank.learning_rate is not None]
    return Observed(
        sum(losses) / len(losses) if losses else None,
        rates[0] if rates else None,
        tuple(sorted(found for rank in ranks for found in rank.differences)),
        sum(rank.dropped for rank in ranks),
    )


@runtime_checkable
class ComparesOutputs(Protocol):
    """A policy that wants comparisons: its checks have ``Check.observed``."""

    @property
    def reference_settings(self) -> ReferenceSettings:
        """How the reference is made and run."""

    def compared(self, decision: Decision, layout: ModelLayout) -> Compared | None:
        """Return what to compare until the next check, or None."""
