"""What an emulated run's steps took, worked out by hand on a clock that is moved by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.timelyfreeze.helpers.ranks import HandClock
from timelyfreeze.control.emulated import EmulatedBatch
from timelyfreeze.records.convergence import SKIPPED_STEPS
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.emulation.record import EmulationRecord, OptimizerClock


class StubRecorder:
    """Hands out the batches it was given, once drained."""

    def __init__(self) -> None:
        self.waiting: list[EmulatedBatch] = []
        self._drained: list[EmulatedBatch] = []

    def drain(self) -> list[Any]:
        self._drained, self.waiting = [*self._drained, *self.waiting], []
        return []

    def take_batches(self) -> list[EmulatedBatch]:
        batches, self._drained = self._drained, []
        return batches


class Optimizer(torch.optim.SGD):
    """Takes a while on the given clock."""

    def __init__(self, clock: HandClock, takes_ms: float) -> None:
        super().__init__(nn.Linear(1, 1).parameters())
        self.clock, self.takes_ms = clock, takes_ms

    def step(self, closure: Any = None) -> None:
        self.clock.now_ms += self.takes_ms


class Run:
    """A record of a run of two ranks and what a step of it does."""

    def __init__(
        self,
        batches_per_step: int = 1,
        optimizers_ms: Sequence[float] = (0.0, 0.0),
        stage_to_rank: Sequence[int] = (0, 1),
    ) -> None:
        self.clock, self.recorder = HandClock(), StubRecorder()
        self.optimizers = [Optimizer(self.clock, ms) for ms in optimizers_ms]
        clock = OptimizerClock(self.optimizers, stage_to_rank, self.clock)
        self.record = EmulationRecord(
            self.recorder,  # type: ignore[arg-type]
            clock,
            max(stage_to_rank) + 1,
            batches_per_step,
        )

    def batches(self, *batches: tuple[float, float]) -> None:
        """(virtual, real) milliseconds."""
        self.recorder.waiting += [EmulatedBatch(*batch) for batch in batches]

    def end_step(self, seconds: float, phase: Phase | None = None, n_tokens: int = 100) -> None:
        self.record.begin_step()
        ends_ms = self.clock.now_ms + 1e3 * seconds
        for optimizer in self.optimizers:
            optimizer.step()
        self.clock.now_ms = ends_ms
        self.record.end_step(phase, n_tokens)

    def step(self, virtual_ms: float, real_ms: float, **step: Any) -> None:
        self.batches((virtual_ms, real_ms))
        self.end_step(**step)


def test_a_step_has_the_virtual_batch_in_place_of_the_real_one() -> None:
    run = Run()
    run.step(40.0, 100.0, seconds=0.12)
    assert run.record.metrics() == {
        "freezing/emulation/virtual_tokens_per_second": pytest.approx(100 / 0.06 / 2),
        "freezing/emulation/virtual_step_ms": pytest.approx(60.0),
        "freezing/emulation/virtual_batch_ms": 40.0,
        "freezing/emulation/real_batch_ms": 100.0,
    }


def test_a_step_of_several_batches_saves_in_each() -> None:
    run = Run(batches_per_step=2)
    run.batches((40.0, 100.0), (50.0, 120.0))
    run.end_step(0.25)
    # 250 - 60 - 70
    assert run.record.metrics()["freezing/emulation/virtual_step_ms"] == pytest.approx(120.0)


def test_replicas_take_turns_and_the_slowest_one_counts() -> None:
    before, run = Run(stage_to_rank=(0, 1, 2, 3), optimizers_ms=(0.0,) * 4), Run(batches_per_step=4)
    before.step(40.0, 100.0, seconds=0.12, phase=Phase.WARMUP)
    before.step(50.0, 100.0, seconds=0.12, phase=Phase.STABLE)
    before.record.collect()
    assert before.record.take_steps_ms() == [60.0, 70.0]
    run.record.go_on_from(before.record)
    assert run.record.n_replicas == 2
    for _ in range(SKIPPED_STEPS + 1):
        run.batches((20.0, 30.0), (30.0, 40.0), (25.0, 30.0), (10.0, 20.0))
        run.end_step(0.15, Phase.STABLE, n_tokens=90)
    summary = run.record.summarize(freezes=True)
    # 20 and 25 ms on one, 30 and 10 on the other; 30 of 150 ms outside.
    assert run.record.take_steps_ms() == [pytest.approx(75.0)] * (SKIPPED_STEPS + 1)
    assert summary["virtual_step_ms"] == pytest.approx(75.0), "of the last pipeline alone"
    n_tokens = (2 * 100 + 90 * (SKIPPED_STEPS + 1)) / (SKIPPED_STEPS + 3)
    assert summary["virtual_tokens_per_second"] == pytest.approx(1e3 * n_tokens / 75.0 / 4)
    assert summary["emulated_ranks"] == 4


def test_steps_without_freezing_are_those_of_the_first_pipeline() -> None:
    before, run = Run(stage_to_rank=(0, 1, 2, 3), optimizers_ms=(0.0,) * 4), Run(batches_per_step=2)
    for _ in range(SKIPPED_STEPS + 1):
        before.step(40.0, 100.0, seconds=0.12, phase=Phase.UPPER_BOUND)
    before.record.collect()
    run.record.go_on_from(before.record)
    for _ in range(SKIPPED_STEPS + 1):
        run.batches((20.0, 30.0), (30.0, 40.0))
        run.end_step(0.15, Phase.UPPER_BOUND)
    assert run.record.summarize(freezes=True)["virtual_step_ms_unfrozen"] == pytest.approx(60.0)


def test_the_step_that_is_logged_has_not_ended_and_comes_next_time() -> None:
    run = Run()
    run.batches((40.0, 100.0))
    assert run.record.metrics() == {}
    run.end_step(0.12)
    run.batches((20.0, 50.0))
    first = run.record.metrics()
    assert first["freezing/emulation/virtual_batch_ms"] == 40.0
    assert run.record.metrics() == {}, "nothing new"
    run.end_step(0.05)
    assert run.record.metrics()["freezing/emulation/virtual_step_ms"] == pytest.approx(20.0)


def test_only_the_slowest_ranks_optimizer_counts() -> None:
    # Stages 0 and 3 lie on rank 0: 12 ms; stages 1 and 2 on rank 1: 7 ms.
    run = Run(optimizers_ms=(10.0, 3.0, 4.0, 2.0), stage_to_rank=(0, 1, 1, 0))
    run.step(40.0, 100.0, seconds=0.14)
    assert run.record.metrics()["freezing/emulation/virtual_step_ms"] == pytest.approx(140 - 60 - 7)


def test_the_speed_is_that_of_each_emulated_device() -> None:
    run = Run(stage_to_rank=(0, 1, 2, 3), optimizers_ms=(0.0,) * 4)
    for n_tokens in (300, 500):
        run.step(50.0, 200.0, seconds=0.2, n_tokens=n_tokens)
    # 800 tokens in 100 ms on four devices
    assert run.record.metrics()["freezing/emulation/virtual_tokens_per_second"] == pytest.approx(
        2000.0
    )


def test_the_summary_leaves_out_cold_steps_and_takes_medians() -> None:
    run = Run()
    for phase, times in {
        Phase.WARMUP: [900, 900, 60],
        Phase.UPPER_BOUND: [900, 900, 60, 64],
        Phase.LOWER_BOUND: [10, 10, 10],
        Phase.RAMP: [50, 50, 50],
        Phase.STABLE: [900, 900, 40, 42, 44],
    }.items():
        for ms in times:
            # All but the batch takes 5 ms; on one device a batch takes twice as long.
            run.step(ms, 2.0 * ms, phase=phase, seconds=(2 * ms + 5) / 1e3)
    summary = run.record.summarize(freezes=True)
    assert summary["emulated_ranks"] == 2
    assert summary["virtual_step_ms_unfrozen"] == pytest.approx(65.0)
    assert summary["virtual_step_ms"] == pytest.approx(47.0)
    assert summary["virtual_tokens_per_second_unfrozen"] == pytest.approx(100 / 0.065 / 2)
    assert summary["virtual_tokens_per_second"] == pytest.approx(100 / 0.047 / 2)
    assert summary["real_batch_ms_unfrozen"] == pytest.approx(124.0)
    assert summary["real_batch_ms"] == pytest.approx(84.0)
    # 65, 65 and 69 ms without freezing, 45, 47 and 49 ms with it.
    error = 47.0 / 65.0 * math.sqrt(math.pi / 6.0) * 1.4826 * 2.0 / 47.0
    assert summary["kappa_error"] == pytest.approx(error)
    assert "batch_ms" not in summary, "the controller's metrics have it"


def test_a_run_without_freezing_has_one_speed_and_its_batch() -> None:
    run = Run()
    for ms in (900, 900, 40, 42, 44):
        run.step(ms, 2.0 * ms, seconds=(2 * ms + 5) / 1e3)
    summary = run.record.summarize(freezes=False)
    assert summary["virtual_step_ms"] == pytest.approx(47.0)
    assert summary["batch_ms"] == 42.0
    assert summary["virtual_step_ms_unfrozen"] is summary["real_batch_ms_unfrozen"] is None


def test_a_run_too_short_to_measure_says_nothing() -> None:
    run = Run()
    run.step(40.0, 80.0, seconds=0.1)
    summary = run.record.summarize(freezes=False)
    assert summary.pop("emulated_ranks") == 2
    assert set(summary.values()) == {None}


def test_turns_count_as_those_of_the_slowest_rank_and_not_where_nothing_is_frozen() -> None:
    run = Run(optimizers_ms=(3.0, 5.0))
    for phase in (Phase.UPPER_BOUND, Phase.STABLE):
        for _ in range(SKIPPED_STEPS + 1):
            run.batches((40.0, 100.0))
            for rank, ms in enumerate((20.0, 10.0)):
                with run.record.optimizers.of_rank(rank):
                    run.clock.now_ms += ms
            # 150 ms in all: 100 of a batch, 30 of turns, 8 of optimizers, 12 of others.
            run.clock.now_ms -= 30.0
            run.end_step(0.15, phase)
    summary = run.record.summarize(freezes=True)
    # 23 ms of the first rank, 15 of the second; without turns 3 and 5.
    assert summary["virtual_step_ms"] == pytest.approx(40.0 + 12.0 + 23.0)
    assert summary["virtual_step_ms_unfrozen"] == pytest.approx(40.0 + 12.0 + 5.0)
