"""Predictions in turns: what is due to the plan is told apart from what is due to the machine."""

import json

import pytest
from turn_times import at_equal_speed, batches_from_json, outcome, resampled

from tests.benchmarks.turns import CAP, OUTSIDE_MS, PLANNED, backward_ms, batches_text
from timelyfreeze.schedule.order import Action

STEADY = {mode: [1.0] * 3 for mode in ("nothing", "everything", CAP)}
# Half as fast again whenever the plan is in force, with one batch that is slower still.
DRIFTING = {"nothing": [1.0, 1.0, 1.0], "everything": [1.0, 1.5, 1.0], CAP: [1.5, 1.5, 3.0]}


def late(mode: str, action: Action) -> float:
    """The backward that ends the batch takes half as long again under the plan as it should."""
    return 1.5 if mode == CAP and action == PLANNED[0] else backward_ms(mode, action)


def test_the_case_solved_by_hand_is_predicted_and_measured() -> None:
    found = outcome(batches_from_json(batches_text(STEADY)), CAP)
    assert found.unfrozen_ms == pytest.approx((9.0, 9.0))
    assert found.batch_ms == pytest.approx((7.0, 7.0))
    assert found.step_ms == pytest.approx((7.0 + OUTSIDE_MS, 7.0 + OUTSIDE_MS))
    assert found.unfrozen_step_ms == pytest.approx(9.0 + OUTSIDE_MS)
    assert [p.error for p in (found.batch_ms, found.unfrozen_ms, found.step_ms)] == pytest.approx(
        3 * [0.0]
    )


def test_a_machine_that_turns_slow_is_no_error_of_the_plan_at_equal_speed() -> None:
    measured = batches_from_json(batches_text(DRIFTING))
    assert outcome(measured, CAP).batch_ms.error == pytest.approx(0.5)
    equal, drift = at_equal_speed(measured)
    assert drift == pytest.approx([1.0, 1.0, 1.5, 1.0, 1.5, 1.5, 1.0, 1.0, 3.0])
    assert outcome(equal, CAP).batch_ms.error == pytest.approx(0.0)
    assert outcome(equal, CAP).batch_ms == pytest.approx((7.0, 7.0))
    assert outcome(equal, CAP).step_ms.error == pytest.approx(0.0)


@pytest.mark.parametrize("drift", [STEADY, DRIFTING])
def test_a_backward_that_is_slower_than_planned_stays_an_error(drift: dict) -> None:
    equal, _ = at_equal_speed(batches_from_json(batches_text(drift, late)))
    assert outcome(equal, CAP).batch_ms == pytest.approx((7.0, 7.5))
    assert outcome(equal, CAP).batch_ms.error == pytest.approx(0.5 / 7.0)


def test_drift_is_read_off_forwards_that_no_mode_shortens() -> None:
    """The first stage's are shorter where it is frozen whole; they must not pass for speed."""
    data = json.loads(batches_text(STEADY))
    for turn in data["turns"]:
        if turn["mode"] == "everything":
            for action in ("0F0", "0F1"):
                turn["ranks"][0]["durations_ms"][action] = 0.5
    _, drift = at_equal_speed(batches_from_json(json.dumps(data)))
    assert drift == pytest.approx([1.0] * 9)


def test_chance_moves_the_outcome_of_uneven_rounds_only() -> None:
    even = resampled(batches_from_json(batches_text(STEADY)), CAP, 5)
    assert [one.batch_ms.error for one in even] == pytest.approx([0.0] * 5)
    uneven = resampled(batches_from_json(batches_text(DRIFTING)), CAP, 20)
    assert len({round(one.batch_ms.error, 6) for one in uneven}) > 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"turns": [{"mode": 1}]}'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of batches in turns"):
        batches_from_json(text)
