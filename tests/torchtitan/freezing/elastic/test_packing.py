"""Which batch suits what is frozen, and the configuration that a run goes on with."""

from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.torchtitan.helpers.job_configs import front_config
from timelyfreeze.cli.torchrun import NEXT, PRESENT
from timelyfreeze.front.plan import BatchPacking
from timelyfreeze.settings import PackingSettings
from torchtitan.freezing.checks import check
from torchtitan.freezing.elastic.packing import (
    GivingBack,
    PackedBatch,
    fewest_ranks,
    first_batch,
    packed_batch,
    present_config,
)
from torchtitan.freezing.elastic.pipeline import BatchScaling, RunState
from torchtitan.freezing.memory.estimate import CutMemory, estimate_memory
from torchtitan.settings import JobConfig, stage_modules

N_LAYERS, START = 10, (2, 3, 3, 2)


def packing(settings: PackingSettings | None = None, **changes: Any) -> JobConfig:
    sizes = {"training__global_batch_size": 64, "training__seq_len": 64, "model__flavor": "8M"}
    chosen = settings or PackingSettings("performance")
    return front_config(freezing__packing=chosen, **{**sizes, **changes})


def at(n_frozen: int) -> RunState:
    return RunState(n_frozen, step=100, n_batches=100)


def test_a_run_begins_as_it_is_configured() -> None:
    start = PackedBatch(BatchPacking(1, 8), 64, START, 1000)
    assert first_batch(packing()) == packed_batch(packing(), at(0)) == start
    assert first_batch(packing(training__global_batch_size=-1)).rows == 8


def splits(n_ranks: int = 4) -> list[tuple[int, ...]]:
    ends = [(0, *inner, N_LAYERS) for inner in combinations(range(1, N_LAYERS), n_ranks - 1)]
    return [tuple(b - a for a, b in pairwise(each)) for each in ends]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("n_frozen", [3, 6, 8])
def test_it_is_the_largest_batch_that_some_cut_has_room_for(schedule: str, n_frozen: int) -> None:
    """Every cut of the model is tried; AutoFreeze's b_l comes from trial passes instead."""
    job_config = packing(parallelism__pipeline_parallel_schedule=schedule)
    limit = max(rank.total for rank in estimate_memory(job_config))
    found = packed_batch(job_config, at(n_frozen))

    def memory(factor: int) -> CutMemory:
        larger = packing(
            parallelism__pipeline_parallel_schedule=schedule,
            parallelism__pipeline_parallel_microbatch_size=factor,
            training__local_batch_size=8 * factor,
        )
        return CutMemory(larger, N_LAYERS)

    def has_room(memory: CutMemory) -> bool:
        return any(memory.of_fullest(split, n_frozen) <= limit for split in splits())

    possible = [factor for factor in (2, 4, 8) if has_room(memory(factor))]
    assert found.packing == BatchPacking(max(possible, default=1), 8 // max(possible, default=1))
    assert (found.rows, found.last_step) == (64, 1000)
    if found.packing.factor > 1:
        assert memory(found.packing.factor).of_fullest(found.split, n_frozen) <= limit
    else:
        assert found.split == START


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("n_frozen", [0, 6, 8])
def test_it_is_the_shortest_pipeline_that_some_cut_has_room_in(
    schedule: str, n_frozen: int
) -> None:
    """Every cut of the model is tried."""
    changes = {
        "parallelism__pipeline_parallel_schedule": schedule,
        "parallelism__pipeline_parallel_microbatch_size": 4,
        "training__local_batch_size": 16,
        "training__seq_len": 128,
    }
    job_config = packing(PackingSettings("efficiency"), **changes)
    limit = max(rank.total for rank in estimate_memory(job_config))

    def fits(n_ranks: int) -> bool:
        changed = packing(**changes, parallelism__pipeline_parallel_degree=n_ranks)
        memory = CutMemory(changed, N_LAYERS)
        return any(memory.of_fullest(split, n_frozen) <= limit for split in splits(n_ranks))

    found = fewest_ranks(job_config, n_frozen)
    assert found.n_ranks == min([n for n in (2, 3) if n_frozen and fits(n)], default=4)
    memory = CutMemory(found.moved(job_config), N_LAYERS)
    assert memory.of_fullest(found.split, n_frozen) <= limit
    if found.n_ranks == 4:
        assert found.split == START


def test_batches_grow_with_the_front() -> None:
    factors = [packed_batch(packing(), at(n)).packing.factor for n in range(N_LAYERS + 1)]
    assert factors == sorted(factors)
    assert (factors[0], factors[-1]) == (1, 8)


def test_rows_of_a_step_grow_up_to_what_the_user_says() -> None:
    """AutoFreeze (Sec. 3.3) grows them without a maximum; here 0 keeps them."""
    for most, rows in ((0, 8), (8, 8), (15, 8), (16, 16), (31, 24)):
        job_config = packing(
            PackingSettings("performance", max_global_batch=most), training__global_batch_size=8
        )
        found = packed_batch(job_config, at(9))
        assert (found.rows, found.packing.accumulations) == (rows, 1)
        # Of 900 batches that were left.
        assert found.last_step == 100 + 900 // (rows // 8)


def test_the_rest_of_a_configuration_stays() -> None:
    job_config = packing(
        PackingSettings("performance", 128, "linear"), validation__local_batch_size=16
    )
    form = PackedBatch(BatchPacking(16, 1, 2), 128, (6, 2, 1, 1), 550)
    moved = form.moved(job_config)
    check(moved)
    training, parallelism = moved.training, moved.parallelism
    assert (training.local_batch_size, training.global_batch_size) == (128, 128)
    assert parallelism.pipeline_parallel_microbatch_size == 16
    assert parallelism.pipeline_parallel_degree == 4
    assert moved.validation.local_batch_size == 16
    assert [len(names) for names in stage_modules(moved, N_LAYERS)] == [7, 2, 1, 3]
    # The run is shorter, its schedule of the learning rate is not.
    assert (training.steps, moved.lr_scheduler.total_steps) == (550, 1000)
    assert form.scaling(job_config) == BatchScaling(2, 2.0)
    job_config.lr_scheduler.total_steps = 2000
    assert form.moved(job_config).lr_scheduler.total_steps == 2000
    assert job_config.training.steps == 1000


def test_a_batch_in_words() -> None:
    form = PackedBatch(BatchPacking(16, 1, 2), 128, (6, 2, 1, 1), 550)
    assert str(form) == (
        "with microbatches 16 times as large as at the start, 1 batches and 128 rows in a step, "
        "6,2,1,1 layers on the ranks, up to step 550"
    )


def test_a_part_leaves_for_fewer_ranks_and_the_next_counts_the_time_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks leave at 100 s; the part that goes on begins at 107.5 s."""
    clock = iter([100.0, 107.5])
    monkeypatch.setattr("torchtitan.freezing.elastic.packing.time.time", lambda: next(clock))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setenv(NEXT, str(tmp_path / "next.json"))
    monkeypatch.delenv(PRESENT, raising=False)
    start = packing(PackingSettings("efficiency"), training__seq_len=128)
    checks = SimpleNamespace(settled_front=0)
    trainer: Any = SimpleNamespace(controller=SimpleNamespace(checks=checks), device_seconds=1.0)
    trainer.step = 9
    before, shorter = GivingBack(start), fewest_ranks(start, 9)
    assert shorter.n_ranks < 4
    before.attach(trainer)
    before.begin()
    assert before.before_step() is None
    checks.settled_front = 9
    leave = before.before_step()
    assert leave is not None
    assert leave.why == f"9 layers are frozen, and the run goes on {shorter}"
    assert trainer.device_seconds == 1.0
    before.end()
    monkeypatch.setenv(PRESENT, (tmp_path / "next.json").read_text())
    moved = present_config(start)
    assert moved.parallelism.pipeline_parallel_degree == shorter.n_ranks
    after = GivingBack(moved)
    after.attach(trainer)
    after.begin()
    assert trainer.device_seconds == 1.0 + 4 * 7.5
    assert after.before_step() is None
