"""Messages that were measured on one pipeline, in plans for others."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from timelyfreeze.schedule.dag import PipelineDag, build_dag
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, order_to_csv, parse_order
from timelyfreeze.settings.freezing import PER_TENSOR
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds
from timelyfreeze.timing.processors import simulate_batch, with_messages
from timelyfreeze.whatif.answers import answer
from timelyfreeze.whatif.bounds_file import (
    BoundsFile,
    PipelineMetadata,
    bounds_file_text,
    read_bounds_file,
    recall,
)
from timelyfreeze.whatif.grid import DEFAULT_SPLIT, Grid
from timelyfreeze.whatif.times import Links, StageTimes, bounds_from_times

# F takes 2 ms, B 4 or 2; a message costs 0.5 ms and is 0.25 or 0.75 ms on its way.
OVERHEAD_MS = 0.5
TRANSFERS = {(0, 1): 0.25, (1, 0): 0.25, (1, 2): 0.75, (2, 1): 0.75}
ORDER = gpipe_order(3, 4)


def plain_bounds(dag: PipelineDag) -> DurationBounds:
    return uniform_bounds(dag, forward_ms=2.0, backward_ms=(2.0, 4.0))


def saved(folder: Path, order: Any = ORDER, overhead_ms: float = OVERHEAD_MS, **notes: Any) -> Path:
    dag = build_dag(order)
    bounds = with_messages(dag, plain_bounds(dag), overhead_ms)
    bounds = replace(bounds, p2p_latency_ms=TRANSFERS if overhead_ms else {})
    path = folder / "bounds.json"
    path.write_text(bounds_file_text(dag, bounds, PipelineMetadata(**notes)))
    (folder / "schedule.csv").write_text(order_to_csv(order))
    return path


@pytest.fixture
def file(tmp_path: Path) -> BoundsFile:
    return read_bounds_file(saved(tmp_path, layers=(2, 2, 2)))


def grid(**changes: Any) -> Grid:
    asked = Grid(
        schedules=("GPipe",),
        caps=(0.0,),
        microbatches=(4,),
        splits=(DEFAULT_SPLIT,),
        n_ranks=3,
        first_stage=PER_TENSOR,
    )
    return replace(asked, **changes)


def gpipe_ms(n_ranks: int, n_microbatches: int, ways_ms: float, overhead_ms: float) -> float:
    """A batch by hand, stages alike.

    All but the first rank take the overhead on top of each forward, all but the last on top of each
    backward. So the second rank sets the pace: the first microbatch passes through all of them,
    then the pace of a rank in the middle holds.
    """
    forwards = (
        2.0 + (n_ranks - 1) * (2.0 + overhead_ms) + (n_microbatches - 1) * (2.0 + overhead_ms)
    )
    backwards = (
        4.0 + (n_ranks - 1) * (4.0 + overhead_ms) + (n_microbatches - 1) * (4.0 + overhead_ms)
    )
    return forwards + backwards + 2 * ways_ms


def test_links_that_were_not_timed_are_as_those_in_the_middle() -> None:
    links = Links(1.0, {**TRANSFERS, (0, 2): 9.0})
    dag = build_dag(gpipe_order(4, 2))
    # The median of 0.25, 0.25, 0.75, 0.75 and 9; ranks 0 and 2 send each other nothing.
    assert links.over(dag) == {**TRANSFERS, (2, 3): 0.75, (3, 2): 0.75}
    assert Links(1.0).over(dag) == {}
    stages = [StageTimes()] * 4
    assert bounds_from_times(dag, stages).delays_ms(dag).sum() == 0.0
    assert bounds_from_times(dag, stages, links).max_ms.sum() == 2 * 3 + 2 * 3


def test_the_overhead_is_no_part_of_a_stage(file: BoundsFile) -> None:
    for stage in file.stage_times():
        assert (stage.forward_ms, stage.backward_ms, stage.frozen_backward_ms) == (2.0, 4.0, 2.0)


def test_the_measured_pipeline_comes_back(file: BoundsFile) -> None:
    recalled = recall(file)
    assert recalled is not None
    assert recalled == pytest.approx([gpipe_ms(3, 4, 0.25 + 0.75, OVERHEAD_MS)] * 2)
    (case,) = answer(file, grid()).cases
    assert case.step_ms == pytest.approx(recalled[0])


def test_more_microbatches_send_more_and_more_ranks_have_more_links(file: BoundsFile) -> None:
    (case,) = answer(file, grid(microbatches=(8,))).cases
    assert case.step_ms == pytest.approx(gpipe_ms(3, 8, 1.0, OVERHEAD_MS))
    # A fourth rank: its link is as the median of the others, 0.5 ms.
    deeper = answer(file, grid(n_ranks=4, splits=((2, 2, 1, 1),)))
    alike = answer(file, grid(n_ranks=2, splits=((3, 3),)))
    assert len(deeper.cases) == len(alike.cases) == 1
    # Two ranks: one link of 0.25 ms each way, stages of 3 and 6 ms, 4 microbatches.
    paces = (3.0 + 4 * 3.5) + (6.0 + 4 * 6.5)
    assert alike.cases[0].step_ms == pytest.approx(paces + 2 * 0.25)


def test_other_schedules_pay_as_well(file: BoundsFile) -> None:
    dag = build_dag(one_f_one_b_order(3, 4))
    bounds = replace(with_messages(dag, plain_bounds(dag), OVERHEAD_MS), p2p_latency_ms=TRANSFERS)
    (case,) = answer(file, grid(schedules=("1F1B",))).cases
    played = simulate_batch(dag, bounds.max_ms, None, bounds.delays_ms(dag))
    assert case.step_ms == pytest.approx(played[1])
    assert case.best_unfrozen_step_ms is not None
    assert case.best_unfrozen_step_ms <= case.step_ms


def test_what_is_told_comes_on_top(file: BoundsFile) -> None:
    (case,) = answer(file, grid(p2p_overhead_ms=1.5)).cases
    assert case.step_ms == pytest.approx(gpipe_ms(3, 4, 1.0, OVERHEAD_MS + 1.5))


def test_stages_on_one_rank_send_nothing(tmp_path: Path) -> None:
    order = parse_order(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    dag = build_dag(order)
    links = Links(0.5, {(0, 1): 1.0, (1, 0): 1.0})
    bounds = bounds_from_times(dag, [StageTimes()] * 4, links)
    assert {str(a) for a, ms in zip(dag.actions, bounds.max_ms, strict=True) if ms} == {
        "1F0", "3F0", "2B0", "0B0",
    }  # fmt: skip
    assert bounds.delays_ms(dag).sum() == 4.0


# --- what is said of it ---------------------------------------------------------------------------


def notes_of(file: BoundsFile, **asked: Any) -> str:
    return "\n".join(answer(file, grid(**asked)).notes)


def test_the_table_says_what_messages_cost(file: BoundsFile, tmp_path: Path) -> None:
    assert "a message costs 0.5 ms as measured; its latency is 0.25 to 0.75 ms" in notes_of(file)
    assert "0.5 ms as measured and 2 ms as told" in notes_of(file, p2p_overhead_ms=2.0)
    silent = read_bounds_file(saved(tmp_path, overhead_ms=0.0))
    assert "messages between ranks cost nothing in these metrics" in notes_of(silent)
    assert "0 ms as measured and 2 ms as told; no link was timed" in notes_of(
        silent, p2p_overhead_ms=2.0
    )


def test_without_the_order_the_overhead_stays_where_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path, ranks=3)
    (tmp_path / "schedule.csv").unlink()
    file = read_bounds_file(path)
    assert [stage.forward_ms for stage in file.stage_times()] == [2.0, 2.5, 2.5]
    found = answer(file, grid())
    # It is not paid twice.
    assert found.cases[0].step_ms == pytest.approx(gpipe_ms(3, 4, 1.0, OVERHEAD_MS))
    assert "no schedule.csv lies beside bounds.json" in "\n".join(found.notes)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("p2p_overhead_ms", -1.0, "p2p_overhead_ms is -1.0; it must be 0 or more"),
        (
            "p2p_overhead_ms",
            "much",
            "p2p_overhead_ms is 'much'; it must be a number",
        ),
        (
            "p2p_overhead_ms",
            3.0,
            "bounds.0B0.min_ms is 2.5, less than the overhead of the message in it",
        ),
        ("p2p_latency_ms", [1.0], "p2p_latency_ms is [1.0]; it must be an object"),
        (
            "p2p_latency_ms",
            {"0-1": 1.0},
            "a key of p2p_latency_ms: '0-1' is no link; it must name two ranks",
        ),
        ("p2p_latency_ms", {"0>1": None}, "p2p_latency_ms.0>1 is None; it must be a number"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, key: str, value: Any, says: str) -> None:
    path = saved(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        read_bounds_file(path)
    assert says in str(error.value)


def test_rounding_of_the_overhead_is_no_error(tmp_path: Path) -> None:
    dag = build_dag(ORDER)
    tiny = DurationBounds(*(np.full(len(dag.actions), 1e-17) for _ in range(2)))
    bounds = with_messages(dag, tiny, 0.1 + 0.2)
    path = tmp_path / "bounds.json"
    path.write_text(bounds_file_text(dag, bounds, PipelineMetadata()))
    (tmp_path / "schedule.csv").write_text(order_to_csv(ORDER))
    assert all(stage.forward_ms >= 0.0 for stage in read_bounds_file(path).stage_times())
