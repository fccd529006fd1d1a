"""Freeze controllers of pretended ranks, each in a thread, with stages that only keep time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from timelyfreeze.actions import Action, ActionKind
from timelyfreeze.controller import FreezeController
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.passes import CollectedFigures
from timelyfreeze.phases import PhaseSchedule
from timelyfreeze.recorder import ActionRecorder
from timelyfreeze.settings import FreezeSettings

TIMEOUT_S = 20.0
# Warm-up 1-2, upper bound 3-4, lower bound 5-6, ramp 7-10, then stable.
PHASES = PhaseSchedule(2, 6, 10)


class HandClock:
    """Stands still until it is moved."""

    gaps_are_work = False

    def __init__(self) -> None:
        self.now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms

    def wait(self, mark: float) -> None:
        """Return at once: this clock moves by hand."""

    def work_ms(self, start: float, end: float) -> float:
        return end - start

    elapsed_ms = work_ms


class StubStage:
    """Has parameters in name only and notes the masks it is given."""

    def __init__(self, stage_index: int, n_parameters: int = 12) -> None:
        self.stage_index = stage_index
        self.parameter_names = tuple(f"layers.{i}.weight" for i in range(n_parameters))
        self.parameter_sizes = np.full(n_parameters, 10, dtype=np.int64)
        self.masks: Mapping[int, np.ndarray] = {}
        self.applied_shares: dict[int, float] = {}
        self.given: list[dict[int, list[bool]]] = []

    def freeze(self, masks: Mapping[int, np.ndarray]) -> None:
        self.masks, self.applied_shares = masks, {}
        self.given.append({m: mask.tolist() for m, mask in masks.items()})

    def freeze_nothing(self) -> None:
        self.masks = {}

    def share(self, microbatch: int) -> float:
        mask = self.masks.get(microbatch)
        return 0.0 if mask is None else float(self.parameter_sizes[mask].sum()) / 120.0


class Hub:
    """Where the exchanges of all ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.values: list[Any] = [None] * size


class ThreadExchange:
    """``timelyfreeze.exchange.Exchange`` between threads; counts what is sent."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub
        self.n_gathers = 0

    def all_gather(self, value: Any) -> list[Any]:
        self._hub.values[self.rank] = value
        self._hub.barrier.wait()
        values = list(self._hub.values)
        self._hub.barrier.wait()
        return values

    def gather(self, value: Any) -> list[Any] | None:
        self.n_gathers += 1
        values = self.all_gather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]


def linear_ms(action: Action, share: float) -> float:
    """1 ms a forward or input gradient; a weight gradient takes 2 ms, less what is frozen of it.

    Later microbatches take a little longer, so that no two plans are equally good. While
    monitoring, all times are binary fractions, so that differences do not depend on the clock.
    """
    weights = 2.0 * (1.0 - share) if action.kind.freezable else 0.0
    rest = 0.0 if action.kind is ActionKind.WEIGHT_BACKWARD else 1.0
    return rest + weights + (action.microbatch + 2 * action.stage) / 64


class Ranks:
    """One controller for each rank of ``declared`` and each replica, run in step."""

    def __init__(
        self,
        declared: ScheduleOrder,
        *,
        executed: ScheduleOrder | None = None,
        n_replicas: int = 1,
        duration_ms: Callable[[Action, float], float] = linear_ms,
        passes_per_step: int = 3,
        n_processors: float | None = None,
        **settings: Any,
    ) -> None:
        self.executed = executed or declared
        self.passes_per_step = passes_per_step
        self.duration_ms = duration_ms
        self.solved: list[list[Any]] = []
        self.hub = Hub(declared.n_ranks * n_replicas)
        self.settings = FreezeSettings(**{"phases": PHASES, "discard_passes": 1, **settings})
        self.controllers: list[FreezeController] = []
        self.exchanges: list[ThreadExchange] = []
        self.stages: list[dict[int, StubStage]] = []
        self.clocks: list[HandClock] = []
        for rank in range(self.hub.size):
            own = [s for s, r in enumerate(declared.stage_to_rank) if r == rank % declared.n_ranks]
            stages = {s: StubStage(s) for s in own}
            clock, calls = HandClock(), []
            recorder = ActionRecorder(clock)
            exchange = ThreadExchange(self.hub, rank)
            controller = FreezeController(
                list(stages.values()),  # type: ignore[arg-type]
                declared,
                self.settings,
                recorder,
                exchange,  # type: ignore[arg-type]
                n_processors=n_processors,
                on_solved=lambda plan, bounds, calls=calls: calls.append((plan, bounds)),
            )
            self.controllers.append(controller)
            self.exchanges.append(exchange)
            self.stages.append(stages)
            self.clocks.append(clock)
            self.solved.append(calls)

    def run(self, first: int, last: int) -> None:
        """Run steps ``first`` to ``last`` on all ranks."""
        self.on_all(lambda rank: self._run_rank(rank, range(first, last + 1)))

    def collect(self) -> list[CollectedFigures]:
        return self.on_all(lambda rank: self.controllers[rank].collect())

    def on_all(self, what: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.hub.size) as pool:
            futures = [pool.submit(what, rank) for rank in range(self.hub.size)]
            return [future.result(timeout=TIMEOUT_S) for future in futures]

    def _run_rank(self, rank: int, steps: Sequence[int]) -> None:
        for step in steps:
            self.controllers[rank].begin_step(step)
            for _ in range(self.passes_per_step):
                self.one_pass(rank)
            self.controllers[rank].end_step()

    def one_pass(self, rank: int, *, fail_at: Action | None = None) -> None:
        controller, stages, clock = self.controllers[rank], self.stages[rank], self.clocks[rank]
        with controller.one_pass():
            for action in self.executed.ranks[rank % self.executed.n_ranks]:
                if action == fail_at:
                    raise RuntimeError(f"{action} failed")
                share = stages[action.stage].share(action.microbatch)
                with controller._recorder.measure(action):
                    clock.now_ms += self.duration_ms(action, share)
                if action.kind.freezable:
                    stages[action.stage].applied_shares[action.microbatch] = share

    def masks(self, rank: int, stage: int) -> Iterator[dict[int, list[bool]]]:
        """What each pass of a stage was given to freeze."""
        yield from self.stages[rank][stage].given
