"""Freeze controllers of pretended ranks, each in a thread, with stages that only keep time."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.timelyfreeze.helpers.stub_policy import StubMeter
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies.layout import ModelLayout, build_layout
from timelyfreeze.policies.policy import FreezePolicy
from timelyfreeze.runtime.recorder import ActionRecorder
from timelyfreeze.schedule.order import Action, ActionKind, ScheduleOrder
from timelyfreeze.settings.freezing import FreezeSettings
from timelyfreeze.settings.phases import PhaseSchedule

TIMEOUT_S = 20.0
N_TENSORS = 12  # of a stage
# Warm-up 1-2, upper bound 3-4, lower bound 5-6, ramp 7-10, then stable.
PHASES = PhaseSchedule(2, 6, 10)


def settings_of(phases: PhaseSchedule = PHASES, **settings: Any) -> FreezeSettings:
    """Return settings with these phases; by default a short run's."""
    return FreezeSettings(
        last_warmup_step=phases.last_warmup_step,
        last_monitor_step=phases.last_monitor_step,
        monitoring=phases.monitoring,
        last_ramp_step=phases.last_ramp_step,
        **{"discard_batches": 1, "max_freeze_ratio": 0.8, "gradient_rank": 0, **settings},
    )


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
    """Has parameters in name only and notes the masks that it is given."""

    frozen_together: tuple[tuple[int, ...], ...] = ()
    exact = np.zeros(N_TENSORS, dtype=np.bool_)
    low_rank = None

    def __init__(self, stage_index: int) -> None:
        self.stage_index = stage_index
        first = stage_index * N_TENSORS
        self.parameter_names = tuple(f"layers.{first + i}.weight" for i in range(N_TENSORS))
        self.parameter_sizes = np.full(N_TENSORS, 10, dtype=np.int64)
        self.masks: Mapping[int, np.ndarray] = {}
        self.applied_ratios: dict[int, float] = {}
        self.given: list[dict[int, list[bool]]] = []
        self.without_input_grads: list[frozenset[int]] = []

    def freeze(
        self, masks: Mapping[int, np.ndarray], *, without_input_grads: Collection[int] = ()
    ) -> None:
        self.masks, self.applied_ratios = masks, {}
        self.without_input_grads.append(frozenset(without_input_grads))
        self.given.append({m: mask.tolist() for m, mask in masks.items()})

    def freeze_nothing(self) -> None:
        self.masks = {}

    def is_idle(self, action: Action) -> bool:
        """Whether nothing of a backward behind the first stage is left."""
        is_cut = self.stage_index > 0 and action.microbatch in self.without_input_grads[-1]
        is_backward = action.kind is not ActionKind.FORWARD
        return is_cut and is_backward and self.fraction(action.microbatch) == 1.0

    def fraction(self, microbatch: int) -> float:
        mask = self.masks.get(microbatch)
        return 0.0 if mask is None else float(self.parameter_sizes[mask].sum()) / (10.0 * N_TENSORS)


class Hub:
    """Where the exchanges of all ranks meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.values: list[Any] = [None] * size


class ThreadExchange:
    """``timelyfreeze.runtime.exchange.Exchange`` between threads; counts what is sent."""

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


def linear_ms(action: Action, fraction: float) -> float:
    """1 ms a forward or input gradient; a weight gradient takes 2 ms, less what is frozen of it.

    Later microbatches take a little longer, so that no two plans are equally good. While
    monitoring, all times are binary fractions, so that differences do not depend on the clock.
    """
    weights = 2.0 * (1.0 - fraction) if action.kind.freezable else 0.0
    rest = 0.0 if action.kind is ActionKind.WEIGHT_BACKWARD else 1.0
    return rest + weights + (action.microbatch + 2 * action.stage) / 64


def stub_layout(n_stages: int) -> ModelLayout:
    """The tensors of as many stub stages."""
    stages = [StubStage(stage) for stage in range(n_stages)]
    return build_layout(
        {
            s.stage_index: list(zip(s.parameter_names, s.parameter_sizes.tolist(), strict=True))
            for s in stages
        }
    )


class Ranks:
    """One controller for each rank of ``declared`` and each replica, run in step.

    With a ``policy`` each of them has a stub meter, which measures 1, 2, ... times the steps of the
    interval for the tensors of the model.
    """

    def __init__(
        self,
        declared: ScheduleOrder,
        *,
        executed: ScheduleOrder | None = None,
        n_replicas: int = 1,
        duration_ms: Callable[[Action, float], float] = linear_ms,
        batches_per_step: int = 3,
        n_processors: float | None = None,
        policy: FreezePolicy | None = None,
        **settings: Any,
    ) -> None:
        self.executed = executed or declared
        self.batches_per_step = batches_per_step
        self.outside_ms = [0.0] * declared.n_ranks * n_replicas  # what each rank's steps add
        self.reducing_ms = 0.0  # what replicas take to add their gradients up, in each batch
        self.duration_ms = duration_ms
        self.solved: list[list[Any]] = []
        self.hub = Hub(declared.n_ranks * n_replicas)
        self.settings = settings_of(**settings)
        self.controllers: list[FreezeController] = []
        self.exchanges: list[ThreadExchange] = []
        self.stages: list[dict[int, StubStage]] = []
        self.clocks: list[HandClock] = []
        self.checks: list[PolicyRunner | None] = []
        for rank in range(self.hub.size):
            own = [s for s, r in enumerate(declared.stage_to_rank) if r == rank % declared.n_ranks]
            stages = {s: StubStage(s) for s in own}
            clock, calls = HandClock(), []
            recorder = ActionRecorder(clock)
            exchange = ThreadExchange(self.hub, rank)
            checks = None
            if policy is not None:
                layout = stub_layout(declared.n_stages)
                checks = self._checks(policy, layout, list(stages.values()), exchange, clock)
            controller = FreezeController(
                list(stages.values()),  # type: ignore[arg-type]
                self.settings,
                recorder,
                exchange,  # type: ignore[arg-type]
                Planner(
                    declared,
                    self.settings,
                    self.settings.phases,
                    exchange,  # type: ignore[arg-type]
                    n_processors=n_processors,
                    on_solved=lambda plan, bounds, calls=calls: calls.append((plan, bounds)),
                ),
                checks,
                **self.more_parts(rank),
            )
            self.controllers.append(controller)
            self.exchanges.append(exchange)
            self.stages.append(stages)
            self.clocks.append(clock)
            self.checks.append(checks)
            self.solved.append(calls)

    def more_parts(self, rank: int) -> dict[str, Any]:
        """What else the controller of a rank is made of."""
        return {}

    def _checks(
        self,
        policy: FreezePolicy,
        layout: ModelLayout,
        stages: Sequence[StubStage],
        exchange: ThreadExchange,
        clock: HandClock,
    ) -> PolicyRunner:
        names = [name for stage in stages for name in stage.parameter_names]
        weights = {name: 1.0 + i for i, name in enumerate(layout.names)}
        meter = None if policy.measurement is None else StubMeter(names, weights)
        return PolicyRunner(
            policy,
            layout,
            [(name, torch.empty(0)) for name in names],
            exchange,  # type: ignore[arg-type]
            meter,  # type: ignore[arg-type]
            clock,
            self.settings.seed,
        )

    def run(self, first: int, last: int) -> None:
        """Run steps ``first`` to ``last`` on all ranks."""
        self.on_all(lambda rank: self._run_rank(rank, range(first, last + 1)))

    def collect(self) -> list[CollectedMetrics]:
        return self.on_all(lambda rank: self.controllers[rank].collect())

    def on_all(self, what: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.hub.size) as pool:
            futures = [pool.submit(what, rank) for rank in range(self.hub.size)]
            return [future.result(timeout=TIMEOUT_S) for future in futures]

    def _run_rank(self, rank: int, steps: Sequence[int]) -> None:
        for step in steps:
            self.controllers[rank].begin_step(step)
            for _ in range(self.batches_per_step):
                self.one_batch(rank)
            self.clocks[rank].now_ms += self.outside_ms[rank]
            self.controllers[rank].end_step()

    def one_batch(self, rank: int, *, fail_at: Action | None = None) -> None:
        controller, stages, clock = self.controllers[rank], self.stages[rank], self.clocks[rank]
        with controller.one_batch():
            for action in self.executed.ranks[rank % self.executed.n_ranks]:
                if action == fail_at:
                    raise RuntimeError(f"{action} failed")
                stage = stages[action.stage]
                fraction = stage.fraction(action.microbatch)
                with controller._recorder.measure(action):
                    if not stage.is_idle(action):
                        clock.now_ms += self.duration_ms(action, fraction)
                if action.kind.freezable:
                    stage.applied_ratios[action.microbatch] = fraction
            with controller._recorder.beside_actions():
                clock.now_ms += self.reducing_ms

    def saved(self) -> dict[str, Any]:
        """What a checkpoint of all ranks holds: tensors, and text as it comes back from JSON."""
        merged: dict[str, Any] = {}
        for controller in self.controllers:
            merged.update(controller.state_dict())
        tensors = {key: value for key, value in merged.items() if isinstance(value, Tensor)}
        text = {key: value for key, value in merged.items() if key not in tensors}
        return {**json.loads(json.dumps(text)), **{k: v.clone() for k, v in tensors.items()}}

    def load(self, state: dict[str, Any]) -> None:
        for controller in self.controllers:
            controller.load_state_dict(state)

    def masks(self, rank: int, stage: int) -> Iterator[dict[int, list[bool]]]:
        """What each pass of a stage was given to freeze."""
        yield from self.stages[rank][stage].given


def without_stable_times(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds but for the batches of the stable phase, and how batches scatter.

    Their times are no binary fractions, and a resumed run leaves its first batches out.
    """
    shown = dict(state)
    for key in [key for key in state if key.startswith("rank_")]:
        rank = json.loads(state[key])
        planner = rank.get("planner", {"samples": {}})
        planner["samples"].pop("stable", None)
        if "solved" in planner:
            bounds = json.loads(planner["solved"]["bounds"])
            planner["solved"]["bounds"] = {**bounds, "interval_factor": None}
        shown[key] = json.dumps(rank)
    return shown


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged at warning level or above, but for what a plan's cap comes to."""
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [m for m in messages if not m.startswith("Freezing does not pay")]
