"""Clocks around actions: how long each microbatch's forward and backward really took on this rank.

Waiting for a peer is not part of an action: the pipeline stage opens a measurement only after what
the action needs has arrived. On a GPU the clock is a pair of CUDA events that are put into the
stream and read later, so measuring never makes the host wait inside a step.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from timelyfreeze.runtime.parts import Masks, StepPart
from timelyfreeze.schedule import Action
from timelyfreeze.settings import Phase, Step
from timelyfreeze.timing import BatchRecord


class Clock(ABC):
    """Takes marks now and tells later how far two of them lie apart."""

    # whether what lies between two actions of a rank is work of its processor, to be counted to the
    # action that follows, and not waiting
    gaps_are_work = False

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark for this moment without waiting for the device."""

    def wait(self, mark: Any) -> None:  # noqa: B027
        """Block until the device has reached ``mark``, as a host always has."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds that passed between two marks that have been reached."""
        return float(end - start)

    def work_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds of work between two marks that have been reached."""
        return self.elapsed_ms(start, end)  # on a core of its own a rank always works


class HostClock(Clock):
    """The process's monotonic clock, for a device that computes when asked (CPU)."""

    def mark(self) -> float:
        """Return the time in milliseconds."""
        return time.perf_counter() * 1e3


class SharedHostClock(Clock):
    """A CPU clock for ranks that share cores.

    Work is the process's processor time: the time a rank waits for a core, or sleeps until a
    message comes, is not part of its actions, but what it spends on messages is, since other ranks
    go without the core meanwhile.
    """

    gaps_are_work = True

    def mark(self) -> tuple[float, float]:
        """Return wall time and the process's processor time in milliseconds."""
        return time.perf_counter() * 1e3, time.process_time() * 1e3

    def elapsed_ms(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """Return the wall time between the marks."""
        return end[0] - start[0]

    def work_ms(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """Return the processor time between the marks."""
        return end[1] - start[1]


class LoneHostClock(HostClock):
    """A CPU clock of the process's processor time, in which other processes do not count."""

    def mark(self) -> float:
        """Return the processor time in milliseconds."""
        return time.process_time() * 1e3


class CudaClock(Clock):
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the stream has passed the event."""
        mark.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the device time between two events."""
        return float(start.elapsed_time(end))


def clock_for(device: torch.device, *, shared: bool = False, lone: bool = False) -> Clock:
    """Return the clock that measures work on ``device``.

    Ranks that outnumber their cores are ``shared``, all those whose actions one thread runs
    ``lone``; both are of interest on a CPU only.
    """
    if device.type == "cuda":
        return CudaClock()
    if lone:
        return LoneHostClock()
    return SharedHostClock() if shared else HostClock()


class ActionRecorder:
    """Collects marks during batches and turns them into :class:`BatchRecord` values when asked.

    Nothing is recorded outside :meth:`recorded_batch`, so evaluation and shape inference leave no
    trace.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # A batch runs in this; and again, in a batch, the reduction of gradients, which belongs to
        # no action.
        self.beside_actions: Callable[[], AbstractContextManager[None]] = nullcontext
        self._finished: list[list[tuple[Action, Any, Any]]] = []
        self._current: list[tuple[Action, Any, Any]] | None = None

    @contextmanager
    def recorded_batch(self) -> Iterator[None]:
        """Record the actions that run inside as one batch; a batch that raises is discarded."""
        self._current = []
        try:
            with self.beside_actions():  # which leaves out the batch but for the blocks in it
                yield
            if self._current:
                self._finished.append(self._current)
        finally:
            self._current = None

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Time the block as (part of) ``action``; blocks of one action add up."""
        if self._current is None:
            yield
            return
        start = self.clock.mark()
        yield
        self._current.append((action, start, self.clock.mark()))

    @contextmanager
    def measure_more(self) -> Iterator[None]:
        """Time the block, the loss of a last forward, as part of the action that ran last."""
        if not self._current:
            yield
            return
        action = self._current[-1][0]
        with self.measure(action):
            yield

    def drain(self) -> list[BatchRecord]:
        """Wait for the device where it lags behind and hand out the batches, oldest first."""
        finished, self._finished = self._finished, []
        if finished:
            self.clock.wait(finished[-1][-1][2])
        return [self._read(marks) for marks in finished]

    def _read(self, marks: list[tuple[Action, Any, Any]]) -> BatchRecord:
        durations_ms: dict[Action, float] = {}
        intervals_ms: dict[Action, tuple[float, float]] = {}
        first = last_end = marks[0][1]
        for action, start, end in marks:
            begin = last_end if self.clock.gaps_are_work else start
            durations_ms[action] = durations_ms.get(action, 0.0) + self.clock.work_ms(begin, end)
            began_ms = intervals_ms.get(action, (self.clock.elapsed_ms(first, start),))[0]
            intervals_ms[action] = (began_ms, self.clock.elapsed_ms(first, end))
            last_end = end
        return BatchRecord(durations_ms, self.clock.elapsed_ms(first, last_end), intervals_ms)


class OutsideClock(StepPart):
    """Adds up the time between the batches of a step, before the first and after the last.

    Only steps are timed in which nothing is frozen: an optimizer has less to do than usual where
    everything is. ``waited_ms`` returns how much of the time of the step so far a rank of its own
    would not take, such as other ranks' optimizers where one process emulates all.
    """

    name = "outside time"

    def __init__(self, clock: Clock, waited_ms: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._waited_ms = waited_ms
        self._marks: list[Any] = []
        self._n_batches = 0
        # Takes the time that a step took for each of its batches, milliseconds.
        self.keep: Callable[[float], None] = lambda ms: None

    def begin_step(self, step: Step) -> None:
        """Enter a step."""
        is_timed = step.phase in (Phase.UPPER_BOUND, Phase.MIXED)
        self._marks, self._n_batches = [self._clock.mark()] if is_timed else [], 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Leave out the block, which runs a batch; within a batch, count it."""
        if not self._marks:
            yield
            return
        self._marks.append(self._clock.mark())
        try:
            yield
        finally:
            self._marks.append(self._clock.mark())

    def end_batch(self, number: int, masks: Masks) -> None:
        """Count a batch that ran."""
        self._n_batches += 1

    def end_step(self, step: Step) -> None:
        """Have the time of a timed step kept. Waits for the device."""
        if not self._marks or not self._n_batches:
            return
        marks = [*self._marks, self._clock.mark()]
        self._clock.wait(marks[-1])
        gaps = zip(marks[::2], marks[1::2], strict=True)
        spent_ms = sum(self._clock.elapsed_ms(start, end) for start, end in gaps)
        self._marks = []
        self.keep(max(0.0, spent_ms - self._waited_ms()) / self._n_batches)
