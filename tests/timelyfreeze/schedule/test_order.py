import itertools
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
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleError,
    ScheduleOrder,
    build_order,
    gpipe_order,
    one_f_one_b_order,
    order_from_csv,
    order_to_csv,
    parse_action,
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


actions = st.builds(
    Action, st.integers(0, 10**6), st.sampled_from(ActionKind), st.integers(0, 10**6)
)


def test_prints_as_stage_letter_microbatch() -> None:
    assert str(Action(3, ActionKind.FULL_BACKWARD, 5)) == "3B5"


@given(actions)
def test_parse_undoes_print(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "3B", "B5", "3X5", "3b5", "3B5 ", "-1F0", "3B-1", "03B5", "0F0,1F0", "٣B5"]
)
def test_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected <stage><F\|B\|I\|W><microbatch>") as error:
        parse_action(text)
    assert repr(text) in str(error.value)


def test_only_weight_gradients_can_be_frozen() -> None:
    assert {kind.value for kind in ActionKind if kind.freezable} == {"B", "W"}


def test_actions_are_values() -> None:
    assert len({Action(1, ActionKind.FORWARD, 2), Action(1, ActionKind.FORWARD, 2)}) == 1
    with pytest.raises(AttributeError):
        Action(1, ActionKind.FORWARD, 2).stage = 3  # type: ignore[misc]


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
