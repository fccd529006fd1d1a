"""Parts of a trainer: additions to its steps, to its batches and to its end."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torchtitan.distributed import ParallelDims

from torchtitan.freezing.elastic.pipeline import BatchScaling
from torchtitan.freezing.report.recorder import RunRecorder
from torchtitan.settings import JobConfig

_Context: TypeAlias = AbstractContextManager[None]


@dataclass(frozen=True)
class Leave:
    """End of a trainer whose run goes on, in this process or in others."""

    config: JobConfig | None = None  # of the next trainer, if in this process
    scaling: BatchScaling = field(default_factory=BatchScaling)
    why: str = ""  # for the report, if in others


class TrainerPart:
    """Addition to a ``FreezingTrainer``; each hook does nothing, and is called on all ranks."""

    trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Take the trainer, once built."""
        self.trainer = trainer

    def begin(self) -> None:
        """Begin, once the trainer's state is loaded."""

    def before_step(self) -> Leave | None:
        """Return whether the trainer ends instead of making its next step."""
        return None

    def around_step(self) -> _Context:
        """Return the context of a step."""
        return nullcontext()

    def around_batch(self, inputs: dict[str, Tensor], labels: Tensor) -> _Context:
        """Return the context of a pipeline batch."""
        return nullcontext()

    def end(self) -> None:
        """End, after the report of a trainer without an error or a signal to stop."""


@dataclass
class SharedRun:
    """Possessions of a run that its trainers use in turn."""

    parts: Sequence[TrainerPart] = ()  # in their order
    told: JobConfig | None = None  # the run's configuration, where each trainer has another
    output: RunRecorder | None = None  # of a run begun elsewhere
    dims: dict[tuple[int, int, int], ParallelDims] = field(default_factory=dict)  # by degrees


@contextmanager
def inside(contexts: Iterable[_Context]) -> Iterator[None]:
    """Enter all contexts."""
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield
