"""What is named below the table, of cases by hand."""

from typing import Any

import pytest

from timelyfreeze.whatif.grid import Case
from timelyfreeze.whatif.report import best_of, cells_of


def case(**changes: Any) -> Case:
    """Eight microbatches that take 100 ms each, 80 ms under the plan."""
    values: dict[str, Any] = {
        "schedule": "1F1B", "n_microbatches": 8, "batches": 1, "max_freeze_ratio": 0.25,
        "gradient_rank": None, "split": "default", "layers": None, "step_ms": 800.0,
        "frozen_step_ms": 640.0, "all_frozen_step_ms": 400.0, "steps_factor": 1.1,
        "mean_ratio": 0.2, "stage_ratios": (0.2,),
        "bubble": 0.3, "frozen_bubble": 0.2, "best_unfrozen_layers": None,
        "best_unfrozen_step_ms": None, "tokens_per_second": None,
    }  # fmt: skip
    return Case(**values | changes)


@pytest.mark.parametrize("unit", ["tokens", "images"])
def test_throughput_counts_what_the_model_reads(unit: str) -> None:
    assert cells_of(case(tokens_per_second=1234.4), unit)[f"{unit}/s"] == "1234"


def test_the_shortest_need_not_be_soonest_at_a_loss() -> None:
    fast = case(max_freeze_ratio=0.8, frozen_step_ms=480.0, steps_factor=1.8)  # 60 * 1.8 = 108
    assert best_of([fast, case()]) == [
        "shortest for each microbatch: 1F1B, 8 microbatches, split default, r_max 0.8: 60.00 ms",
        "soonest at a loss: 1F1B, 8 microbatches, split default, r_max 0.25: 80.00 ms, times 1.10 "
        "steps",
        "its keys: --parallelism.pipeline_parallel_schedule=1F1B --freezing.method=timelyfreeze "
        "--freezing.max_freeze_ratio=0.25",
        "adapters (--freezing.method=lora) leave out the gradients of all weights: 1F1B, 8 "
        "microbatches, split default, 50.00 ms",
    ]


def test_of_several_ranks_it_is_the_one_soonest_at_a_loss() -> None:
    ranks = [
        case(gradient_rank=rank, frozen_step_ms=frozen_ms, steps_factor=factor)
        for rank, frozen_ms, factor in ((0, 560.0, 1.4), (64, 600.0, 1.05), (16, 580.0, 1.1))
    ]
    shortest, soonest, keys, _ = best_of(ranks)
    assert "r_max 0.25, rank 0: 70.00 ms" in shortest
    assert "r_max 0.25, rank 64: 75.00 ms, times 1.05 steps" in soonest  # 78.75; 79.75 and 98.00
    assert keys.endswith("--freezing.gradient_rank=64")


def test_where_no_cap_pays_it_is_the_fastest_without_freezing() -> None:
    slow = case(steps_factor=1.5, all_frozen_step_ms=320.0)
    other = case(
        schedule="ZBVZeroBubble",
        split="time",
        step_ms=720.0,
        frozen_step_ms=700.0,
        steps_factor=1.05,
    )
    unknown = case(schedule="GPipe", frozen_step_ms=560.0, steps_factor=None)
    assert best_of([slow, other, unknown]) == [
        "shortest for each microbatch: GPipe, 8 microbatches, split default, r_max 0.25: 70.00 ms",
        "soonest at a loss: ZBVZeroBubble, 8 microbatches, split time, without freezing: 90.00 ms",
        "its keys: --parallelism.pipeline_parallel_schedule=ZBVZeroBubble --freezing.method=none "
        "--parallelism.partition=time",
        "adapters (--freezing.method=lora) leave out the gradients of all weights: 1F1B, 8 "
        "microbatches, split default, 40.00 ms",
    ]
