"""Parts showing and recording a run by common hooks, and their shared knowledge."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torchtitan.tools.logging import logger

from timelyfreeze.control import CollectedMetrics, FreezeController
from timelyfreeze.files import Table, write_whole
from timelyfreeze.planning import FreezePlan
from timelyfreeze.records.convergence import StepLog
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.records.tables import FrozenCount, Move
from timelyfreeze.runtime import Exchange, ObservedBatch
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.settings import JobConfig

Row = TypeVar("Row")


@dataclass
class Run:
    """A run as seen by all its parts."""

    config: JobConfig  # its configuration, of an elastic run that of its first pipeline
    start: RunSummary  # what is known of it before its first step
    folder: Path  # where its files go
    is_shown: bool  # whether this is the process that has the loss, which shows and writes
    exchange: Exchange  # talks to the other ranks
    n_layers: int | None = None  # layers of the model; None for a model that does not count them
    device: torch.device | None = None  # whose memory is watched
    flops_per_token: float = math.nan  # what the model needs with nothing frozen; NaN: not known
    peak_flops: float = math.nan  # those of a device each second, likewise
    # of the present pipeline; None for a run without freezing
    controller: FreezeController | None = None
    emulation: EmulationRecord | None = None  # likewise; None where every rank has its own process
    steps: StepLog = field(default_factory=StepLog)  # by this process's clock
    seconds: float = 0.0  # sum of the step times so far, without validation and checkpoints
    # time of a step over that of an unfrozen one; None before freezing began
    kappa: float | None = None
    moves: list[Move] = field(default_factory=list)  # those so far, the oldest first
    frozen_counts: Sequence[FrozenCount] = ()  # of its tensors; empty until it ends
    has_news: bool = False  # whether there is something that was not drawn yet
    has_warned: bool = False  # whether it was told that files cannot be written
    # processes that share a batch, in the present pipeline
    ranks_per_replica: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin in the first pipeline."""
        self.ranks_per_replica = self.start.ranks_per_replica

    @property
    def phase(self) -> Phase | None:
        """Phase of the present step; None for a run without freezing."""
        return None if self.controller is None else self.controller.step.phase

    def phase_of(self, step: int) -> Phase | None:
        """Return the phase of the present step, of the number ``step``."""
        learns_adapters = self.controller is None and step <= self.config.lora.until
        return Phase.ADAPTERS if learns_adapters else self.phase

    @property
    def counted_steps(self) -> StepLog:
        """Steps by the relevant clock, virtual in an emulation."""
        return self.steps if self.emulation is None else self.emulation.steps

    @property
    def n_held(self) -> int:
        """How often the processes together hold the model."""
        return self.start.n_devices // self.ranks_per_replica

    @property
    def n_replicas(self) -> int:
        """Number of pipelines sharing a batch; an emulation holds the model once for all."""
        return self.n_held if self.emulation is None else self.emulation.n_replicas

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write files inside: a full disk is told once, as a gap in a curve costs no run its night.

        Checkpoints do not come through here; without them a run has nothing to show.
        """
        try:
            yield
        except OSError as error:
            if not self.has_warned:
                self.has_warned = True
                logger.warning(
                    "The run's files in %s cannot be written (%s); training goes on, and metrics "
                    "are missing there from now on",
                    self.folder,
                    error.strerror or error,
                )

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, where this process writes; who is killed leaves no half."""
        if self.is_shown:
            with self.writing():
                write_whole(self.folder / name, text.encode())
            logger.debug("Wrote %s", self.folder / name)

    def append(self, table: Table[Row], rows: Sequence[Row]) -> None:
        """Append rows to a table, begun with its first rows; empty for a part without."""
        if self.is_shown:
            with self.writing():
                table.append(self.folder, rows)


class LoggedStep(NamedTuple):
    """A step with logged metrics, before its end."""

    step: int
    loss: float
    grad_norm: float
    phase: Phase | None = None  # None for a run without freezing
    metrics: CollectedMetrics | None = None  # what all ranks have exchanged; None likewise


class EndedStep(NamedTuple):
    """A finished step."""

    step: int
    phase: Phase | None
    seconds: float
    n_tokens: int  # of the processes that share a batch
    of_device: float  # each one's of these


class RunPart:
    """A part showing or recording a run; every rank has the communicating parts."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def begin_pipeline(self) -> None:
        """Begin to observe a pipeline, the first or another."""

    def begin_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Note the plan followed now; ``about`` as ``pipeline_metadata``."""

    def move(self, move: Move) -> None:
        """Note a finished move."""

    def read(self, n_tokens: int, n_padding: int) -> None:
        """Note this rank's read examples: all tokens, and padding."""

    def batch(self, observed: ObservedBatch) -> None:
        """Take note of a batch of this rank, the oldest first; all ranks run the same ones."""

    def collect(self, metrics: CollectedMetrics) -> None:
        """Note all ranks' measurements since the last time."""

    def log_step(self, logged: LoggedStep) -> dict[str, float | None] | None:
        """Take note of a logged step, and return its metrics by tag, None for unknown ones."""

    def log_validation(self, step: int, loss: float, scores: dict[str, Any]) -> None:
        """Note a validation, and its further counts."""

    def log_held_out(self, step: int, parts: Sequence[tuple[int, float]]) -> None:
        """Take note of targets and mean loss of each part of a validation."""

    def end_step(self, ended: EndedStep) -> None:
        """Take note of a finished step."""

    def gather(self) -> None:
        """Gather the rest of a pipeline, left or ended."""

    def leave(self) -> None:
        """Let go of a pipeline; the run goes on in another."""

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        """Return the part's own fields of the summary, given those of the parts before."""
        return {}

    def finish(self, summary: RunSummary) -> None:
        """Show or write a run's final results."""

    def close(self) -> None:
        """Write the rest, and close open files; may be called twice."""
