"""Words a user may choose from."""

import pytest

from timelyfreeze.settings.choices import FreezeSettings
from timelyfreeze.settings.phases import PhaseSchedule

PHASES = PhaseSchedule(1, 3, 5)
KNOWN = {
    "first_stage": ("all_or_nothing", "per_tensor"),
    "score_memory": ("device", "host"),
    "score_dtype": ("float32", "bfloat16"),
}


@pytest.mark.parametrize("key", KNOWN)
def test_every_known_word_is_taken(key: str) -> None:
    for word in KNOWN[key]:
        assert getattr(FreezeSettings(PHASES, **{key: word}), key) == word


@pytest.mark.parametrize("key", KNOWN)
@pytest.mark.parametrize("word", ["", "Host", "float16"])
def test_another_word_is_told_with_its_key_and_the_known_ones(key: str, word: str) -> None:
    message = f"{key} is {word!r}; known: {', '.join(KNOWN[key])}"
    with pytest.raises(ValueError, match="known") as error:
        FreezeSettings(PHASES, **{key: word})
    assert str(error.value) == message


def test_all_errors_are_told_at_once() -> None:
    words = {"first_stage": "half", "score_memory": "host", "score_dtype": "int8"}
    errors = [
        "first_stage is 'half'; known: all_or_nothing, per_tensor",
        "score_dtype is 'int8'; known: float32, bfloat16",
    ]
    with pytest.raises(ValueError, match="first_stage") as error:
        FreezeSettings(PHASES, **words)
    assert str(error.value) == "; ".join(errors)


def test_nothing_asked_nothing_wrong() -> None:
    FreezeSettings(PHASES)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"solver_delay_steps": -1},
            "solver_delay_steps is -1; it must be 0 or more and below the 2",
        ),
        ({"solver_delay_steps": 2}, "solver_delay_steps is 2; .* the 2 steps of the ramp"),
        ({"replan_every": -1}, "replan_every is -1; it must be 0 or more"),
        ({"replan_threshold": 0.0}, "replan_threshold is 0.0; it must be above 0"),
        ({"replan_threshold": float("inf")}, "replan_threshold is inf"),
        ({"min_gain": -1.5}, "min_gain is -1.5; it must be -1 or more and finite"),
        ({"min_gain": float("nan")}, "min_gain is nan"),
        ({"seed": -1}, r"seed is -1; it must be 0 or more and below 2\*\*64"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_numbers_that_leave_planning_no_room_are_told(numbers: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FreezeSettings(PHASES, **numbers)


def test_a_method_without_a_plan_needs_no_room() -> None:
    FreezeSettings(PhaseSchedule.unplanned(3), solver_delay_steps=5)
    FreezeSettings(PHASES, solver_delay_steps=1, replan_every=0, min_gain=-1.0)
