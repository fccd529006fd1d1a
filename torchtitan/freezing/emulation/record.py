"""Steps of an emulated pipeline: how long they took here, and how long on devices of their own."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from timelyfreeze.control import EmulatedBatch, EmulatedRecorder
from timelyfreeze.records.convergence import StepLog, TimedStep
from timelyfreeze.runtime import Clock
from timelyfreeze.settings import Phase

# A rank, from when to when it had something to do, and whether that were turns of subspaces.
_Work = tuple[int, Any, Any, bool]


class OptimizerClock:
    """Times the optimizers of learning stages, on ``ranks``, which step theirs at once."""

    def __init__(self, optimizers: Sequence[Optimizer], ranks: Sequence[int], clock: Clock) -> None:
        self.clock = clock
        self._marks: list[_Work] = []
        self._began: Any = None
        for optimizer, rank in zip(optimizers, ranks, strict=True):
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(partial(self._end, rank))

    def _begin(self, *_: Any) -> None:
        self._began = self.clock.mark()

    def _end(self, rank: int, *_: Any) -> None:
        self._marks.append((rank, self._began, self.clock.mark(), False))

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Count time inside, of turned subspaces, as a rank's optimizer time."""
        began = self.clock.mark()
        yield
        self._marks.append((rank, began, self.clock.mark(), True))

    def take_marks(self) -> list[_Work]:
        """Return the marks since the last call, for ``waited_ms``."""
        marks, self._marks = self._marks, []
        return marks

    def waited_ms(self, marks: Sequence[_Work] | None = None) -> float:
        """Return the optimizers' total time beyond the slowest rank's.

        Without ``marks`` in the present step, before its marks are taken.
        """
        by_rank = self._by_rank(self._marks if marks is None else marks)
        return sum(by_rank) - max(by_rank, default=0.0)

    def turning_ms(self, marks: Sequence[_Work]) -> float:
        """Return how much longer the slowest rank took because subspaces were turned."""
        without = self._by_rank([work for work in marks if not work[3]])
        return max(self._by_rank(marks), default=0.0) - max(without, default=0.0)

    def _by_rank(self, marks: Sequence[_Work]) -> list[float]:
        by_rank: dict[int, float] = {}
        for rank, start, end, _ in marks:
            self.clock.wait(end)
            by_rank[rank] = by_rank.get(rank, 0.0) + self.clock.elapsed_ms(start, end)
        return list(by_rank.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStep(TimedStep):
    """A finished optimizer step, with virtual batches and only the slowest rank's optimizer."""

    batches: tuple[EmulatedBatch, ...]


@dataclass(eq=False)
class EmulationRecord:
    """Collects the times of batches and steps of an emulated pipeline.

    Batches are known once the recorder is read, steps at their end, in either order.
    """

    recorder: EmulatedRecorder
    optimizers: OptimizerClock
    n_ranks: int
    batches_per_step: int

    def __post_init__(self) -> None:
        """Begin without steps."""
        self._batches: list[EmulatedBatch] = []
        self._began: Any = None
        self._ended: list[Any] = []  # phase, marks, tokens and optimizers' marks of each step
        self.steps = StepLog()
        self._not_shown: list[EmulatedStep] = []
        self._not_taken: list[EmulatedStep] = []
        self.n_replicas = 1

    def go_on_from(self, former: EmulationRecord) -> None:
        """Resume a run in this record's pipeline, with replicas on all its ranks."""
        self.n_replicas = former.n_ranks // self.n_ranks
        self.n_ranks = former.n_ranks
        self.steps, self._not_shown = former.steps, former._not_shown
        self._not_taken = former._not_taken
        self.steps.begin_pipeline()

    def begin_step(self) -> None:
        """Note a step's begin."""
        self._began = self.optimizers.clock.mark()

    def end_step(self, phase: Phase | None, n_tokens: int) -> None:
        """Note a step's end."""
        span = self._began, self.optimizers.clock.mark()
        self._ended.append((phase, span, n_tokens, self.optimizers.take_marks()))

    def collect(self) -> None:
        """Complete the steps all of whose batches are known; a controller has collected before."""
        self.recorder.drain()
        self._batches.extend(self.recorder.take_batches())
        n = self.batches_per_step
        while self._ended and len(self._batches) >= n:
            (phase, (began, ended), n_tokens, marks), *self._ended = self._ended
            mine, self._batches = tuple(self._batches[:n]), self._batches[n:]
            self.optimizers.clock.wait(ended)
            real_ms = self.optimizers.clock.elapsed_ms(began, ended)
            outside_ms = real_ms - sum(b.real_ms for b in mine) - self.optimizers.waited_ms(marks)
            # The slowest replica's; they take turns.
            replicas = [mine[i :: self.n_replicas] for i in range(self.n_replicas)]
            virtual_ms = outside_ms + max(sum(b.virtual_ms for b in turn) for turn in replicas)
            turning_ms = self.optimizers.turning_ms(marks)
            step = EmulatedStep(phase, virtual_ms, n_tokens, turning_ms, batches=mine)
            for steps in (self._not_shown, self._not_taken):
                steps.append(step)
            self.steps.add(step)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the steps completed since the last call."""
        self.collect()
        steps, self._not_shown = self._not_shown, []
        if not steps:
            return {}
        batches = [batch for step in steps for batch in step.batches]
        virtual_ms = sum(step.ms for step in steps)
        speed = 1e3 * sum(step.n_tokens for step in steps) / virtual_ms / self.n_ranks
        return {
            "freezing/emulation/virtual_tokens_per_second": speed,
            "freezing/emulation/virtual_step_ms": virtual_ms / len(steps),
            "freezing/emulation/virtual_batch_ms": statistics.median(b.virtual_ms for b in batches),
            "freezing/emulation/real_batch_ms": statistics.median(b.real_ms for b in batches),
        }

    def take_steps_ms(self) -> list[float]:
        """Return the virtual times of the steps completed since the last call."""
        steps, self._not_taken = self._not_taken, []
        return [step.ms for step in steps]

    def summarize(self, *, freezes: bool) -> dict[str, Any]:
        """Return the summary's fields of an emulation alone."""
        self.collect()
        steps: Any = self.steps  # each an EmulatedStep
        of_steps = steps.summed_up(freezes=freezes, n_devices=self.n_ranks)
        before = steps.unfrozen(Phase.UPPER_BOUND) or steps.unfrozen()  # or control steps
        after = [batch for step in steps.frozen(freezes=freezes) for batch in step.batches]
        fields: dict[str, Any] = {
            "emulated_ranks": self.n_ranks,
            **{f"virtual_{name}": value for name, value in of_steps.items()},
            "kappa_error": steps.kappa_error() if freezes else None,
            "real_batch_ms_unfrozen": _median(b.real_ms for step in before for b in step.batches),
            "real_batch_ms": _median(batch.real_ms for batch in after),
        }
        if not freezes:
            fields["batch_ms"] = _median(batch.virtual_ms for batch in after)
        return fields


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None
