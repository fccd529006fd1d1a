import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import (
    BY_HAND,
    TWO_BY_TWO,
    V_SHAPE,
    hand_order,
    random_order,
)
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleError,
    build_order,
    one_f_one_b_order,
    order_from_csv,
    order_to_csv,
    parse_order,
)


def test_properties_of_a_v_shape() -> None:
    order = parse_order(V_SHAPE)
    assert (order.n_ranks, order.n_stages, order.n_microbatches) == (2, 4, 2)
    assert order.stage_to_rank == (0, 1, 1, 0)
    assert order.ranks[1][4] == Action(2, ActionKind.FULL_BACKWARD, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the schedule has no ranks"),
        (["0F0 0B0", ""], "rank 1 has no actions"),
        (["0F0 0B0 0F0"], "rank 0, position 2: action 0F0 was already run by rank 0, position 0"),
        (
            ["0F0 0B0", "1F0 1B0 0F1 0B1"],
            "rank 1, position 2: action 0F1 belongs to stage 0, which rank 0 holds",
        ),
        (["0F0 0B0", "2F0 2B0"], "no rank runs stage 1, yet stage 2 exists"),
        (["0F0 0B0 0B1"], "rank 0, positions 0 to 2: action 0F1 is missing"),
        (["0F0 0F1 0B1"], "rank 0, positions 0 to 2: action 0I0 is missing"),
        (["0F0 0B0", "1F0 1I0"], "rank 1, positions 0 to 1: action 1W0 is missing"),
        (["0F1 0B1"], "action 0F0 is missing"),
        (["0F0 0I0 0B0"], "rank 0, position 1: action 0I0 repeats work of 0B0"),
        (["0F0 0B0 0W0"], "rank 0, position 2: action 0W0 repeats work of 0B0"),
        (["0B0 0F0"], "rank 0, position 0: action 0B0 runs before 0F0 (position 1)"),
        (["0I0 0F0 0W0"], "rank 0, position 0: action 0I0 runs before 0F0"),
        (["0F0 0W0 0I0"], "rank 0, position 1: action 0W0 runs before 0I0"),
        (["0F0 0B0 0REDUCE_GRAD"], "rank 0, position 2: '0REDUCE_GRAD' is not an action"),
    ],
)
def test_refuses(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        parse_order(rows)
    assert "the schedule's CSV file" in str(error.value)


def test_refuses_negative_numbers() -> None:
    row = [Action(0, ActionKind.FORWARD, -1), Action(0, ActionKind.FULL_BACKWARD, -1)]
    with pytest.raises(ScheduleError, match="rank 0, position 0: action 0F-1 has a negative"):
        build_order([row])


def test_error_shows_the_whole_order_in_short_lines() -> None:
    row = " ".join(f"0F{m}" for m in range(64))
    with pytest.raises(ScheduleError) as error:
        parse_order([row, "1F0 1B0"])
    first, *grid = str(error.value).splitlines()
    assert first.endswith("the order is:")
    assert max(map(len, grid)) <= 100
    assert " ".join(line.strip() for line in grid) == f"rank 0: {row} rank 1: 1F0 1B0"


def test_error_shows_the_beginnings_of_the_rows_of_a_long_order() -> None:
    rows = [list(row) for row in one_f_one_b_order(64, 512).ranks]
    rows[50].append(rows[50][0])
    with pytest.raises(ScheduleError) as error:
        build_order(rows)
    first, *grid = str(error.value).splitlines()
    assert first.startswith("rank 50, position 1024: action 50F0 was already run")
    assert grid[0].startswith("rank 0: 0F0 0F1 ")
    assert grid[-1] == "and 56 more ranks"
    assert len(str(error.value)) < 5000


@given(st.integers(0, 10**6))
def test_csv_round_trip(seed: int) -> None:
    order = random_order(seed)
    assert order_from_csv(order_to_csv(order)) == order


@pytest.mark.parametrize("name", BY_HAND)
def test_csv_is_the_text_of_the_rows(name: str) -> None:
    text = order_to_csv(hand_order(name))
    assert text.splitlines() == [row.replace(" ", ",") for row in BY_HAND[name]]


def test_csv_skips_bubbles_and_closing_blank_lines() -> None:
    text = "0F0, 0F1,,0B0,0B1\r\n,1F0,1F1,1B0,1B1,\r\n\r\n"
    assert order_from_csv(text) == parse_order(TWO_BY_TWO)


def test_csv_error_counts_bubbles_as_positions() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 2: '1G0' is not an action"):
        order_from_csv("0F0,0B0\n1F0,,1G0\n")


def test_csv_rank_of_bubbles_only_is_empty() -> None:
    with pytest.raises(ScheduleError, match="rank 0 has no actions"):
        order_from_csv(",,\n0F0,0B0\n")
