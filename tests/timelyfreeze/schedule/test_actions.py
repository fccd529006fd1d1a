import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.schedule.order import Action, ActionKind, parse_action

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
