"""What a run record makes of steps, batches and losses, worked out by hand."""

import math
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan.tools.utils as titan_tools

from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.front.caching import CacheUse
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios
from timelyfreeze.records.convergence import kappa_error
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds
from torchtitan.freezing.report import times
from torchtitan.freezing.report.parts import EndedStep, LoggedStep
from torchtitan.freezing.report.times import (
    BatchTimes,
    Memory,
    StepTimes,
    convergence,
    summary_at_start,
    utilization,
)
from torchtitan.settings.job_config import JobConfig

START = make_summary()


def make_plan() -> FreezePlan:
    """90 ms unfrozen, 77.5 ms planned, 60 ms at best, by hand; 5 ms beside each batch."""
    dag, bounds = build_dag(hand_order("two_by_two")), replace(uniform(), outside_ms=5.0)
    ratios = {"1B0": 1.0, "0B1": 0.25}
    plan = plan_from_ratios(dag, bounds, [ratios.get(str(a), 0.0) for a in dag.actions])
    assert (plan.unfrozen_batch_ms, plan.batch_ms, plan.frozen_batch_ms) == (90.0, 77.5, 60.0)
    return plan


def controller(
    plan: FreezePlan | None, failure: str | None = None, *, plans: bool = True,
    switched_off: str | None = None,
) -> Any:  # fmt: skip
    return SimpleNamespace(
        plan=plan,
        planner=SimpleNamespace(failure=failure),
        phases=SimpleNamespace(measures=plans),
        subspaces=SimpleNamespace(dimension=64),
        turns=SimpleNamespace(turning_ms=lambda: 0.0),
        active_plan=SimpleNamespace(
            switched_off=switched_off,
            predicts_for="4 ranks that share 2 cores",
            dag=None,
            bounds=plan and SimpleNamespace(interval_factor=1.25, captured_mean_error=None),
        ),
    )


def uniform() -> DurationBounds:
    dag = build_dag(hand_order("two_by_two"))
    return uniform_bounds(dag, forward_ms=10.0, backward_ms=(10.0, 20.0))


def metrics(batch_ms: dict[Phase, tuple[float, ...]]) -> CollectedMetrics:
    return CollectedMetrics(batch_ms, {0: 0.125, 1: 0.5}, average_freeze_ratio=0.2345)


class Record:
    """The parts of a run that measure, and what follows from them."""

    def __init__(self, start: RunSummary = START) -> None:
        self.run = run_in(start=start)
        self.steps, self.batches = StepTimes(self.run), BatchTimes(self.run)

    def add_step(self, step: int, phase: Phase | None, seconds: float, n_tokens: float) -> None:
        """``n_tokens`` are those of a step for each device."""
        self.run.seconds += seconds
        for part in (self.steps, self.batches):
            part.end_step(EndedStep(step, phase, seconds, 0, n_tokens))

    def add_batches(self, metrics: CollectedMetrics) -> None:
        self.batches.collect(metrics)

    def begin_pipeline(self) -> None:
        self.steps.leave()
        self.batches.begin_pipeline()

    def summarize(self, of: Any) -> RunSummary:
        self.run.controller = of
        summary = self.run.start
        for part in (self.steps, self.batches):
            summary = replace(summary, **part.fields(summary))
        return summary


def record_of(steps: list[tuple[Phase | None, list[float]]], n_tokens: int = 200) -> Record:
    record, step = Record(), 0
    for phase, seconds in steps:
        for each in seconds:
            step += 1
            record.add_step(step, phase, each, n_tokens)
    return record


def test_speed_and_batches_of_a_frozen_run() -> None:
    # The first two steps of a phase run cold and do not count; of the others the median does.
    record = record_of(
        [
            (Phase.WARMUP, [9.0, 9.0, 0.2, 0.2]),
            (Phase.UPPER_BOUND, [9.0, 9.0, 0.4, 0.2]),
            (Phase.LOWER_BOUND, [0.01] * 4),
            (Phase.RAMP, [0.15] * 4),
            (Phase.STABLE, [9.0, 9.0, 0.16, 0.16, 7.0]),
        ]
    )
    record.add_batches(metrics({Phase.UPPER_BOUND: (90.0, 99.0), Phase.STABLE: (500.0,)}))
    record.add_batches(
        metrics({Phase.UPPER_BOUND: (200.0,), Phase.STABLE: (77.5, 62.0), Phase.RAMP: (1.0,)})
    )
    summary = record.summarize(controller(make_plan()))
    # 200 tokens of each device in 0.2 s, then in 0.16 s.
    assert summary.tokens_per_second_unfrozen == pytest.approx(1000.0)
    assert summary.step_ms_unfrozen == pytest.approx(200.0)
    assert summary.tokens_per_second == pytest.approx(1250.0)
    assert summary.step_ms == pytest.approx(160.0)
    assert summary.seconds == pytest.approx(18.4 + 18.6 + 0.04 + 0.6 + 25.32)
    assert summary.steps_done == 21
    assert (summary.batch_ms_unfrozen_predicted, summary.batch_ms_unfrozen) == (90.0, 99.0)
    assert (summary.batch_ms_predicted, summary.batch_ms) == (77.5, 77.5)
    assert (summary.outside_ms, summary.step_ms_predicted) == (5.0, 77.5 + 5.0)
    assert (summary.interval_factor, summary.predicts_for) == (1.25, "4 ranks that share 2 cores")
    assert summary.all_frozen_batch_ms == 60.0
    assert summary.upper_bound_gain == pytest.approx(0.5)
    assert summary.planned_gain == pytest.approx(90 / 77.5 - 1)
    assert summary.gradient_rank == 64
    assert summary.planned_stage_ratios == {0: 0.125, 1: 0.5}
    assert summary.stage_ratios == {0: 0.125, 1: 0.5}
    assert summary.average_freeze_ratio == 0.2345
    assert summary.failure is None
    assert summary.score_ms_per_step is summary.score_memory_mib is None


def test_what_the_run_had_of_its_cache_is_what_was_collected_last() -> None:
    record = Record()
    for use in (CacheUse(2, 0, 0, 0, 1.0, None), CacheUse(9, 4, 2**20, 2**19, 2.5, 80.0, 7)):
        record.add_batches(CollectedMetrics({}, {}, 0.0, cache=use))
    summary = record.summarize(controller(make_plan()))
    assert (summary.cache_batches, summary.cache_entered) == (9, 4)
    assert (summary.cache_saved_ms, summary.cache_spent_ms) == (80.0, 2.5)
    assert (summary.cache_mib, summary.cache_read_ahead) == (1.5, 7)
    assert Record().summarize(controller(make_plan())).cache_batches is None


def test_what_is_said_with_freezing_is_of_the_last_pipeline() -> None:
    record = Record()
    for step, seconds in enumerate([9.0, 9.0, 0.4], 1):
        record.add_step(step, Phase.WARMUP, seconds, n_tokens=100)
    for step, seconds in enumerate([9.0, 9.0, 0.3], 4):
        record.add_step(step, Phase.STABLE, seconds, n_tokens=100)
    used = CacheUse(5, 2, 2**20, 0, 1.0, 30.0)
    measured = {Phase.WARMUP: (90.0,), Phase.STABLE: (80.0,)}
    record.add_batches(CollectedMetrics(measured, {}, 0.1, drift=3.0, cache=used))
    record.begin_pipeline()
    assert record.batches.cache == used
    assert record.summarize(controller(None, plans=False)).tokens_per_second is None
    for step, seconds in enumerate([9.0, 9.0, 0.2], 7):
        record.add_step(step, Phase.STABLE, seconds, n_tokens=100)
    used = CacheUse(3, 1, 2**19, 0, 2.0, None)
    record.add_batches(CollectedMetrics({Phase.STABLE: (40.0,)}, {0: 1.0}, 0.2, cache=used))
    summary = record.summarize(controller(None, plans=False))
    assert (summary.step_ms_unfrozen, summary.step_ms) == (400.0, 200.0)
    assert (summary.tokens_per_second_unfrozen, summary.tokens_per_second) == (250.0, 500.0)
    assert (summary.batch_ms_unfrozen, summary.batch_ms, summary.drift) == (90.0, 40.0, None)
    assert (summary.steps_done, summary.seconds) == (9, pytest.approx(54.9))
    assert (summary.cache_batches, summary.cache_entered, summary.cache_mib) == (8, 3, 0.5)
    assert (summary.cache_saved_ms, summary.cache_spent_ms) == (30.0, 3.0)


def test_unfrozen_steps_are_those_of_the_first_pipeline_and_batches_those_of_the_last() -> None:
    """Steps for what freezing and moves bring together, batches beside the last prediction."""
    record = record_of([(Phase.UPPER_BOUND, [9.0, 9.0, 0.4])])
    record.add_batches(CollectedMetrics({Phase.UPPER_BOUND: (90.0,)}, {}, 0.1))
    record.begin_pipeline()
    for step, seconds in enumerate([9.0, 9.0, 0.1, 0.1, 0.1], 4):
        record.add_step(step, Phase.UPPER_BOUND, seconds, n_tokens=100)
    record.add_batches(CollectedMetrics({Phase.UPPER_BOUND: (50.0,)}, {}, 0.1))
    summary = record.summarize(controller(make_plan()))
    assert (summary.step_ms_unfrozen, summary.batch_ms_unfrozen) == (400.0, 50.0)


def test_a_step_of_several_batches() -> None:
    start = replace(START, batches_per_step=4)
    summary = Record(start).summarize(controller(make_plan()))
    assert (summary.outside_ms, summary.step_ms_predicted) == (20.0, 4 * 77.5 + 20.0)


def test_mixed_monitoring_has_no_unfrozen_batches_but_those_of_warm_up() -> None:
    record = record_of([(Phase.WARMUP, [9.0, 9.0, 0.3]), (Phase.MIXED, [9.0, 9.0, 0.25])])
    record.add_batches(metrics({Phase.WARMUP: (95.0,), Phase.MIXED: (70.0,)}))
    summary = record.summarize(controller(make_plan()))
    assert (summary.step_ms_unfrozen, summary.batch_ms_unfrozen) == (pytest.approx(300.0), 95.0)


def test_batches_of_a_former_plan_are_not_compared_with_the_last() -> None:
    record = record_of([(Phase.STABLE, [9.0, 9.0, 0.2])])
    record.add_batches(metrics({Phase.WARMUP: (95.0,), Phase.STABLE: (70.0, 71.0, 72.0)}))
    record.batches.begin_plan(make_plan(), uniform())
    record.add_batches(metrics({Phase.STABLE: (77.0,)}))
    summary = record.summarize(controller(make_plan()))
    assert (summary.batch_ms, summary.batch_ms_unfrozen) == (77.0, 95.0)


def test_steps_since_freezing_was_switched_off_are_no_frozen_ones() -> None:
    record = record_of([(Phase.STABLE, [9.0, 9.0, 0.2]), (Phase.OFF, [9.0, 9.0, 0.3, 0.3])])
    summary = record.summarize(controller(make_plan(), switched_off="from step 4 on: why"))
    assert (summary.step_ms, summary.step_ms_off) == (pytest.approx(200.0), pytest.approx(300.0))
    assert summary.switched_off == "from step 4 on: why"


def test_utilization_is_what_the_model_needs_over_what_a_device_reaches_at_most() -> None:
    summary = replace(START, tokens_per_second=15_600.0, tokens_per_second_unfrozen=7_800.0)
    used = utilization(summary, 2e9, 312e12)
    assert used == pytest.approx(
        {"peak_tflops": 312.0, "mfu_percent": 10.0, "mfu_percent_unfrozen": 5.0}
    )
    virtual = {"virtual_tokens_per_second": 31_200.0, "virtual_tokens_per_second_unfrozen": None}
    emulated = utilization(replace(summary, emulated_ranks=4, **virtual), 2e9, 312e12)
    assert emulated["mfu_percent"] == pytest.approx(20.0), "by the virtual clock"
    assert emulated["mfu_percent_unfrozen"] is None
    assert utilization(summary, 2e9, math.nan) == {}, "a CPU has no known peak"


def test_the_time_to_a_loss_is_by_steps_else_by_planned_batches_else_unknown() -> None:
    def time_to_loss(**known: Any) -> float | None:
        summary = replace(START, steps_factor=1.2, **known)
        found: float | None = convergence(summary)["time_to_loss"]
        return found

    planned = {"batch_ms_unfrozen_predicted": 100.0, "batch_ms_predicted": 70.0}
    steps = {"step_ms_unfrozen": 200.0, "step_ms": 150.0}
    assert time_to_loss(**planned, **steps) == pytest.approx(0.75 * 1.2)
    assert time_to_loss(**planned) == pytest.approx(0.7 * 1.2)
    assert time_to_loss() is None
    # What was switched off takes the time that it takes without freezing.
    assert time_to_loss(**planned, **steps, switched_off="from step 9 on") is None


def test_how_steps_scatter_is_told() -> None:
    record = record_of(
        [(Phase.WARMUP, [9.0, 9.0, 0.3, 0.4, 0.5]), (Phase.STABLE, [9.0, 9.0, 0.2, 0.2, 0.3])]
    )
    want = kappa_error([300.0, 400.0, 500.0], [200.0, 200.0, 300.0])
    assert want is not None
    assert record.summarize(controller(make_plan())).kappa_error == pytest.approx(want)
    assert record.summarize(None).kappa_error is None


def test_what_was_known_at_the_start_stays() -> None:
    summary = record_of([]).summarize(None)
    same = {"method", "schedule", "seed", "device", "steps", "started_at", "dataset"}
    assert {name: getattr(summary, name) for name in same} == {
        name: getattr(START, name) for name in same
    }


def test_uneven_padding_does_not_show_as_speed() -> None:
    record = Record()
    for step, n_tokens in enumerate((100, 500, 900, 100), 1):
        record.add_step(step, Phase.WARMUP, 0.5, n_tokens)
    for step in range(5, 9):
        record.add_step(step, Phase.STABLE, 0.5, n_tokens=400)
    summary = record.summarize(controller(make_plan()))
    assert summary.tokens_per_second_unfrozen == summary.tokens_per_second == 800.0


def test_a_run_without_freezing_has_one_speed_and_no_batches() -> None:
    summary = record_of([(None, [9.0, 9.0, 0.5, 0.5])], n_tokens=250).summarize(None)
    assert (summary.tokens_per_second, summary.step_ms) == (500.0, 500.0)
    assert summary.tokens_per_second_unfrozen is summary.step_ms_unfrozen is None
    assert summary.batch_ms is summary.batch_ms_predicted is summary.batch_ms_unfrozen is None
    assert summary.stage_ratios is summary.average_freeze_ratio is summary.failure is None


@pytest.mark.parametrize("n_steps", [0, 2])
def test_cold_steps_alone_give_no_speed(n_steps: int) -> None:
    summary = record_of([(None, [1.0] * n_steps)]).summarize(None)
    assert summary.tokens_per_second is summary.step_ms is None
    assert summary.steps_done == n_steps


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (None, "not enough steps to measure"),
        ("status 'Time limit reached'", "status 'Time limit reached'"),
    ],
)
def test_a_plan_that_is_missing_has_a_reason(failure: str | None, text: str) -> None:
    summary = record_of([(Phase.WARMUP, [0.5] * 3)]).summarize(controller(None, failure))
    assert summary.failure == text
    assert summary.batch_ms_predicted is summary.all_frozen_batch_ms is summary.planned_gain is None


def test_a_method_that_does_not_plan_misses_none() -> None:
    """Its warm-up is followed by the stable phase, so warm-up's batches are the unfrozen ones."""
    record = record_of([(Phase.WARMUP, [0.2] * 4), (Phase.STABLE, [0.1] * 4)])
    record.add_batches(metrics({Phase.WARMUP: (30.0, 50.0), Phase.STABLE: (20.0,)}))
    summary = record.summarize(controller(None, plans=False))
    assert summary.failure is None
    assert (summary.batch_ms_unfrozen, summary.batch_ms) == (40.0, 20.0)
    assert summary.batch_ms_predicted is summary.planned_stage_ratios is None
    assert summary.stage_ratios == {0: 0.125, 1: 0.5}


def test_the_largest_peak_of_memory_of_all_ranks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([-1, 2 * 1024**3, 3 * 1024**3, 1024**3])
    stats = SimpleNamespace(memory_stats=lambda device: {"reserved_bytes.all.peak": next(peaks)})
    monkeypatch.setattr(titan_tools, "device_module", stats)
    found = Memory(run_in(device=torch.device("cpu")))
    found.log_step(LoggedStep(1, 2.0, 1.0))
    want: dict[str, float | None] = {"peak_memory_gib": None}
    assert found.fields(START) == want, "a device that tells none has none"
    found.log_validation(1, 2.0, {})
    found.gather()
    found.log_step(LoggedStep(2, 2.0, 1.0))
    assert found.fields(START) == {"peak_memory_gib": 3.0}
    found.run.exchange = SimpleNamespace(all_gather=lambda mine: [mine, 4 * 1024**3, -1])  # type: ignore[assignment]
    assert found.fields(START) == {"peak_memory_gib": 4.0}


def test_drift_is_the_median_since_the_last_plan() -> None:
    record = Record()
    for drift in (9.0, None, 9.0):
        record.add_batches(replace(metrics({}), drift=drift))
    record.batches.begin_plan(make_plan(), uniform())
    assert record.summarize(controller(None)).drift is None
    for drift in (1.0, 1.1, None, 3.0):
        record.add_batches(replace(metrics({}), drift=drift))
    assert record.summarize(controller(None)).drift == 1.1


def dims(pp: int, world_size: int = 4) -> Any:
    return SimpleNamespace(pp_enabled=pp > 1, world_size=world_size, non_data_parallel_size=pp)


def job_config() -> JobConfig:
    config = JobConfig()
    config.job.config_file = "train_configs/tiny_8m.toml"
    config.model.flavor = "8M"
    config.training.dataset = "alpaca"
    config.training.dataset_path = "./rows"
    config.training.steps = 120
    config.parallelism.pipeline_parallel_schedule = "GPipe"
    put(config, "freezing", method="timelyfreeze")
    config.debug.seed = 3
    config.data.seed = 5
    return config


def test_what_a_pipeline_run_knows_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "usable_cores", lambda: 1.5)
    start = summary_at_start(job_config(), dims(2), "Abacus 3000", "cpu")
    assert (start.method, start.schedule, start.model) == ("timelyfreeze", "GPipe", "llama3 8M")
    assert (start.seed, start.data_seed, start.steps) == (3, 5, 120)
    assert (start.n_devices, start.ranks_per_replica) == (4, 2)
    assert start.device == "Abacus 3000, 1.5 cores"
    assert start.dataset == "alpaca: ./rows"
    several = job_config()
    several.data.paths = ["a.jsonl", "owner/b"]
    several.parallelism.pipeline_parallel_schedule_csv = "my/eager.csv"
    other = summary_at_start(several, dims(2), "", "cpu")
    assert (other.dataset, other.schedule) == ("alpaca: a.jsonl, owner/b", "eager.csv")
    assert start.config_file == "train_configs/tiny_8m.toml"
    assert start.torch_version == torch.__version__
    assert start.steps_done == 0
    assert datetime.fromisoformat(start.started_at).tzinfo is not None


def test_what_does_not_apply_is_none() -> None:
    config = job_config()
    config.data.shuffle = False
    config.debug.seed = None
    start = summary_at_start(config, dims(1), "NVIDIA H100", "cuda")
    assert start.schedule is start.seed is start.data_seed is None
    assert start.device == "NVIDIA H100", "cores are a matter of the CPU"
    config.data.shuffle = True
    config.training.dataset, config.training.dataset_path = "c4_test", None
    start = summary_at_start(config, dims(1), "NVIDIA H100", "cuda")
    assert (start.dataset, start.data_seed) == ("c4_test", None)
