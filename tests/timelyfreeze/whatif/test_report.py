"""What is named above the table, of cases by hand, and the table itself."""

import tomllib
from typing import Any

import pytest

from timelyfreeze.whatif.grid import Case
from timelyfreeze.whatif.report import Report, best_of, cells_of


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
    verdict, soonest, *toml, shortest, adapters, _ = best_of([fast, case()])
    assert verdict == "freezing pays: a loss in 0.88 of the time without it, as estimated"
    assert soonest == (
        "shortest time to a loss: 1F1B, 8 microbatches, r_max 0.25: 80.00 ms a microbatch, "
        "times 1.10 steps"
    )
    assert tomllib.loads("\n".join(toml)) == {
        "parallelism": {"pipeline_parallel_schedule": "1F1B"},
        "freezing": {"method": "timelyfreeze", "max_freeze_ratio": 0.25},
    }
    assert shortest == (
        "shortest step with freezing: 1F1B, 8 microbatches, r_max 0.8: 60.00 ms a microbatch"
    )
    assert adapters == (
        'adapters (method = "lora") leave out gradients: 1F1B, 8 microbatches, '
        "50.00 ms a microbatch"
    )


def test_of_several_ranks_it_is_the_one_soonest_at_a_loss() -> None:
    ranks = [
        case(gradient_rank=rank, frozen_step_ms=frozen_ms, steps_factor=factor)
        for rank, frozen_ms, factor in ((0, 560.0, 1.4), (64, 600.0, 1.05), (16, 580.0, 1.1))
    ]
    _, soonest, *toml, shortest, _, _ = best_of(ranks)
    assert "r_max 0.25, rank 0: 70.00 ms" in shortest
    # 78.75, beside 79.75 and 98.00
    assert "r_max 0.25, rank 64: 75.00 ms a microbatch, times 1.05 steps" in soonest
    assert tomllib.loads("\n".join(toml))["freezing"]["gradient_rank"] == 64


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
    verdict, soonest, *toml, shortest, adapters, _ = best_of([slow, other, unknown])
    assert verdict == "freezing does not pay: nothing reaches a loss sooner, as estimated"
    assert soonest.endswith(
        "ZBVZeroBubble, 8 microbatches, split time, without freezing: 90.00 ms a microbatch"
    )
    assert tomllib.loads("\n".join(toml)) == {
        "parallelism": {"pipeline_parallel_schedule": "ZBVZeroBubble", "partition": "time"},
        "freezing": {"method": "none"},
    }
    assert shortest.endswith("GPipe, 8 microbatches, r_max 0.25: 70.00 ms a microbatch")
    assert adapters.endswith("1F1B, 8 microbatches, 40.00 ms a microbatch")


def test_without_an_estimate_nothing_is_promised() -> None:
    assert best_of([case(steps_factor=None)])[0].startswith("whether freezing pays is not known")


def report(*cells: dict[str, str]) -> list[str]:
    return Report("title " * 30, {}, cells, [], ["legend " * 30], ["note"]).text().splitlines()


def test_a_table_is_as_wide_as_a_terminal_and_names_what_has_no_room() -> None:
    rows = [{"schedule": "GPipe", "wide": "w" * 70, "last": f"{n}" * 30} for n in range(2)]
    rows = [row | {"wide": f"{n}{row['wide']}"} for n, row in enumerate(rows)]
    lines = report(*rows)
    assert max(map(len, lines)) <= 100
    assert "without room here, in --csv: last" in lines
    assert lines[3].split() == ["schedule", "wide"]


def test_what_rows_have_in_common_is_told_once() -> None:
    row = {"schedule": "GPipe", "split": "default", "r_max": "auto", "rank": "8", "gain": "+1%"}
    rows = [row, row | {"r_max": "0.8"}, row | {"schedule": "1F1B"}]
    lines = report(*rows)
    assert "in all rows: split default, rank 8, gain +1%" in lines
    table = [line.split() for line in lines if line.split()[:1] in (["GPipe"], ["1F1B"])]
    assert table == [["GPipe", "auto", "0.8"], ["1F1B", "auto"]]
    assert "in all rows" not in "".join(report(row))
