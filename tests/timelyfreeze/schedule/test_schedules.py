import itertools

import pytest

from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import (
    ActionKind,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
    parse_order,
)

SIZES = [(s, m) for s, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 16)) if m >= s]


def test_gpipe_by_hand() -> None:
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert gpipe_order(2, 3) == parse_order(rows)


def test_one_f_one_b_by_hand() -> None:
    rows = [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]
    assert one_f_one_b_order(3, 5) == parse_order(rows)


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
@pytest.mark.parametrize("generate", [gpipe_order, one_f_one_b_order])
def test_complete_and_executable(generate, n_stages: int, n_microbatches: int) -> None:
    order = generate(n_stages, n_microbatches)
    assert len(build_dag(order).actions) == 2 * n_stages * n_microbatches
    assert order.stage_to_rank == tuple(range(n_stages))


def max_activations_held(order: ScheduleOrder, stage: int) -> int:
    steps = [1 if a.kind is ActionKind.FORWARD else -1 for a in order.ranks[stage]]
    return max(itertools.accumulate(steps))


@pytest.mark.parametrize(("n_stages", "n_microbatches"), SIZES)
def test_one_f_one_b_holds_few_activations(n_stages: int, n_microbatches: int) -> None:
    order = one_f_one_b_order(n_stages, n_microbatches)
    held = [max_activations_held(order, stage) for stage in range(n_stages)]
    assert held == [n_stages - stage for stage in range(n_stages)]


def test_one_f_one_b_needs_as_many_microbatches_as_stages() -> None:
    with pytest.raises(ValueError, match="microbatches is 3; this schedule with 4 stages needs"):
        one_f_one_b_order(4, 3)


@pytest.mark.parametrize("generate", [gpipe_order, one_f_one_b_order])
def test_refuses_nothing_to_do(generate) -> None:
    with pytest.raises(ValueError, match="number of stages is 0"):
        generate(0, 4)
    with pytest.raises(ValueError, match="number of microbatches is 0"):
        generate(1, 0)
