"""Steps of an emulated pipeline: how long they took here, and how long on devices of their own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from timelyfreeze.emulation import EmulatedBatch, EmulatedRecorder
from timelyfreeze.records import SKIPPED_STEPS, UNFROZEN_PHASES, kappa_error
from timelyfreeze.runtime import Clock
from timelyfreeze.settings import Phase


class OptimizerClock:
    """Times the optimizer of each stage, which the ranks of a pipeline step at the same time.

    Args:
        optimizers: One for each stage that learns.
        ranks: Rank that would hold each.
        clock: Takes the marks, those of whole steps as well; of the kind that times the batches.
    """

    def __init__(self, optimizers: Sequence[Optimizer], ranks: Sequence[int], clock: Clock) -> None:
        self.clock = clock
        self._marks: list[tuple[int, Any, Any]] = []
        self._began: Any = None
        for optimizer, rank in zip(optimizers, ranks, strict=True):
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(self._end_of(rank))

    def _begin(self, *_: Any) -> None:
        self._began = self.clock.mark()

    def _end_of(self, rank: int) -> Callable[..., None]:
        def end(*_: Any) -> None:
            self._marks.append((rank, self._began, self.clock.mark()))

        return end

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Count what runs inside as part of the optimizer of a rank."""
        began = self.clock.mark()
        yield
        self._marks.append((rank, began, self.clock.mark()))

    def take_marks(self) -> list[tuple[int, Any, Any]]:
        """Return the marks since the last call, for ``waited_ms``."""
        marks, self._marks = self._marks, []
        return marks

    def waited_in_step_ms(self) -> float:
        """Return ``waited_ms`` of the step at hand, whose marks have not been taken yet."""
        return self.waited_ms(self._marks)

    def waited_ms(self, marks: Sequence[tuple[int, Any, Any]]) -> float:
        """Return how much longer the optimizers took one by one than the slowest rank's alone."""
        by_rank: dict[int, float] = {}
        for rank, start, end in marks:
            self.clock.wait(end)
            by_rank[rank] = by_rank.get(rank, 0.0) + self.clock.elapsed_ms(start, end)
        return sum(by_rank.values()) - max(by_rank.values(), default=0.0)


@dataclass(frozen=True)
class EmulatedStep:
    """A finished optimizer step.

    Attributes:
        phase: Phase of the step; None without freezing.
        n_tokens: Tokens it learned from.
        virtual_ms: What it took here, milliseconds, with virtual batches in place of those that ran
            here, and with the slowest rank's optimizer in place of all.
        batches: Its batches.
    """

    phase: Phase | None
    n_tokens: int
    virtual_ms: float
    batches: tuple[EmulatedBatch, ...]


class EmulationRecord:
    """Puts together what the batches and steps of an emulated pipeline took.

    Batches become known when the recorder is read, steps when they end, so a step is complete once
    both have come.

    Args:
        recorder: Has the batches.
        optimizers: Times the optimizers.
        n_ranks: Ranks that are emulated.
        batches_per_step: Batches of a step (gradient accumulation).

    Attributes:
        n_replicas: Pipelines side by side on the emulated ranks, which take turns here.
    """

    def __init__(
        self,
        recorder: EmulatedRecorder,
        optimizers: OptimizerClock,
        n_ranks: int,
        batches_per_step: int,
    ) -> None:
        self._recorder = recorder
        self._optimizers = optimizers
        self._n_ranks = n_ranks
        self._batches_per_step = batches_per_step
        self._batches: list[EmulatedBatch] = []
        self._began: Any = None
        self._ended: list[
            tuple[Phase | None, tuple[Any, Any], int, list[tuple[int, Any, Any]]]
        ] = []
        self._steps: list[EmulatedStep] = []
        self._n_shown = 0
        self._n_taken = 0
        self._n_former = self._n_first = 0
        self.n_replicas = 1

    def go_on_from(self, former: EmulationRecord) -> None:
        """Take up a run that goes on in this record's pipeline, with replicas on all its ranks.

        Args:
            former: The record so far, which has collected everything.
        """
        self.n_replicas = former._n_ranks // self._n_ranks
        self._n_ranks = former._n_ranks
        self._steps = former._steps
        self._n_shown, self._n_taken = former._n_shown, former._n_taken
        self._n_former = len(self._steps)
        self._n_first = former._n_first or self._n_former

    def begin_step(self) -> None:
        """Take note that a step begins."""
        self._began = self._optimizers.clock.mark()

    def end_step(self, phase: Phase | None, n_tokens: int) -> None:
        """Take note that the step has ended."""
        span = self._began, self._optimizers.clock.mark()
        self._ended.append((phase, span, n_tokens, self._optimizers.take_marks()))

    def collect(self) -> None:
        """Read the recorder and complete the steps all of whose batches are known.

        A controller that shares the recorder must have collected before.
        """
        self._recorder.drain()
        self._batches.extend(self._recorder.take_batches())
        n = self._batches_per_step
        while self._ended and len(self._batches) >= n:
            (phase, (began, ended), n_tokens, marks), *self._ended = self._ended
            mine, self._batches = tuple(self._batches[:n]), self._batches[n:]
            self._optimizers.clock.wait(ended)
            real_ms = self._optimizers.clock.elapsed_ms(began, ended)
            outside_ms = real_ms - sum(b.real_ms for b in mine) - self._optimizers.waited_ms(marks)
            virtual_ms = outside_ms + self._slowest_ms(mine)
            self._steps.append(EmulatedStep(phase, n_tokens, virtual_ms, mine))

    def _slowest_ms(self, batches: Sequence[EmulatedBatch]) -> float:
        """Return how long the slowest replica takes for its batches; they take turns."""
        n = self.n_replicas
        return max(sum(batch.virtual_ms for batch in batches[i::n]) for i in range(n))

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log: of the steps completed since the last call.

        The step that is being logged has not ended yet and comes with the next call.
        """
        self.collect()
        steps, self._n_shown = self._steps[self._n_shown :], len(self._steps)
        if not steps:
            return {}
        batches = [batch for step in steps for batch in step.batches]
        virtual_ms = sum(step.virtual_ms for step in steps)
        n_tokens = sum(step.n_tokens for step in steps)
        return {
            "freezing/emulation/virtual_tokens_per_second": 1e3
            * n_tokens
            / virtual_ms
            / self._n_ranks,
            "freezing/emulation/virtual_step_ms": virtual_ms / len(steps),
            "freezing/emulation/virtual_batch_ms": statistics.median(b.virtual_ms for b in batches),
            "freezing/emulation/real_batch_ms": statistics.median(b.real_ms for b in batches),
        }

    def take_steps(self) -> list[tuple[Phase | None, float]]:
        """Return phase and virtual milliseconds of each step completed since the last call."""
        steps, self._n_taken = self._steps[self._n_taken :], len(self._steps)
        return [(step.phase, step.virtual_ms) for step in steps]

    def summarize(self, *, freezes: bool) -> dict[str, Any]:
        """Return the fields of a run's summary that only an emulated pipeline has.

        Args:
            freezes: Whether the run had phases; without, all of it counts as one.
        """
        self.collect()
        before = self._warm(UNFROZEN_PHASES, until=self._n_first or None)
        after = self._warm([Phase.STABLE] if freezes else [None], self._n_former)
        measuring = self._warm([Phase.UPPER_BOUND], until=self._n_first or None)
        batches_before = [b for s in measuring or before for b in s.batches]
        fields: dict[str, Any] = {
            "emulated_ranks": self._n_ranks,
            "virtual_tokens_per_second_unfrozen": self._tokens_per_second(before),
            "virtual_tokens_per_second": self._tokens_per_second(after),
            "virtual_step_ms_unfrozen": _median(s.virtual_ms for s in before),
            "virtual_step_ms": _median(s.virtual_ms for s in after),
            "virtual_step_ms_off": _median(s.virtual_ms for s in self._warm([Phase.OFF])),
            "kappa_error": None
            if not freezes
            else kappa_error([s.virtual_ms for s in before], [s.virtual_ms for s in after]),
            "real_batch_ms_unfrozen": _median(b.real_ms for b in batches_before),
            "real_batch_ms": _median(b.real_ms for s in after for b in s.batches),
        }
        if not freezes:
            fields["batch_ms"] = _median(b.virtual_ms for s in after for b in s.batches)
        return fields

    def _warm(
        self, phases: Sequence[Phase | None], since: int = 0, until: int | None = None
    ) -> list[EmulatedStep]:
        steps = self._steps[since:until]
        return [
            step
            for phase in phases
            for step in [s for s in steps if s.phase is phase][SKIPPED_STEPS:]
        ]

    def _tokens_per_second(self, steps: Sequence[EmulatedStep]) -> float | None:
        """Return tokens/s of each device at the run's mean number of tokens in a step."""
        if not steps:
            return None
        n_tokens = statistics.fmean(step.n_tokens for step in self._steps)
        step_ms = statistics.median(step.virtual_ms for step in steps)
        return 1e3 * n_tokens / step_ms / self._n_ranks


def _median(values: Any) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None
