"""Freezing that is switched off: because it brings, or promises, too little."""

import logging

import numpy as np
import pytest

from tests.timelyfreeze.helpers.moving_times import ALONE, EXACT, ORDER, Machine, messages
from tests.timelyfreeze.helpers.ranks import Ranks
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.schedule.order import Action
from timelyfreeze.settings.phases import Phase


def test_freezing_that_brings_too_little_twice_is_switched_off_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine()
    # Backwards that are left out altogether would be a gain whatever freezing saves.
    settings = {**EXACT, "replan_threshold": 9.0, "skip_input_grads": "off"}
    ranks = Ranks(ALONE, duration_ms=machine, n_replicas=2, **settings)
    ranks.run(1, 12)
    machine.freezing_saves = 0.0
    ranks.run(13, 16)
    assert not messages(caplog, "switched off")
    assert [c.active_plan.switched_off for c in ranks.controllers] == [None, None]
    machine.freezing_saves = 1.0
    ranks.run(17, 20)
    machine.freezing_saves = 0.0
    ranks.run(21, 24)
    caplog.clear()
    ranks.run(25, 28)
    assert [c.step.phase for c in ranks.controllers] == [Phase.STABLE] * 2, "step 28 was frozen"
    ranks.run(29, 40)
    (first, second) = messages(caplog, "switched off")
    assert first == second, "one line of each rank, of which one is shown"
    assert first.startswith("Freezing is switched off from step 29 on: the measured gain is +0.0%")
    assert "under min_gain (0.02) 2 times in a row" in first
    assert not messages(caplog, "phase off")
    for rank, controller in enumerate(ranks.controllers):
        given = list(ranks.masks(rank, 0))
        assert any(given[3 * 27 : 3 * 28])
        assert given[3 * 28 :] == [{}] * (3 * 12)
        assert controller.step.phase is Phase.OFF
        assert set(controller.expected_stage_ratios().values()) == {0.0}
        assert controller.expected_batch_ms() == controller.plan.unfrozen_batch_ms
        assert not controller.planner.lacks_plan(controller.step)
    after = Ranks(ALONE, n_replicas=2, **settings)
    after.load(ranks.saved())
    after.run(41, 44)
    assert list(after.masks(1, 1)) == [{}] * 12
    assert (
        after.controllers[0].active_plan.switched_off
        == ranks.controllers[0].active_plan.switched_off
    )
    assert after.collect()[0].batch_ms.keys() == {Phase.OFF}


def test_plans_made_anew_do_not_hide_that_freezing_saves_nothing() -> None:
    """With all backwards frozen in part, frozen ones alone say that times have moved."""
    machine = Machine()
    settings = {**EXACT, "skip_input_grads": "off", "first_stage": "per_tensor"}
    ranks, stopped = (Ranks(ALONE, duration_ms=machine, **settings) for _ in range(2))
    for each in (ranks, stopped):
        machine.freezing_saves = 1.0
        each.run(1, 9)
        machine.freezing_saves = 0.0
        each.run(10, 12)
    assert len(ranks.solved[0]) == 2, "made again"
    assert ranks.controllers[0].active_plan.switched_off is None
    ranks.run(13, 16)
    resumed = Ranks(ALONE, duration_ms=machine, **settings)
    resumed.load(stopped.saved())
    assert resumed.saved() == stopped.saved()
    resumed.run(13, 16)
    for each in (ranks, resumed):
        assert each.controllers[0].active_plan.switched_off is not None
        assert "measured gain is +0.0%" in each.controllers[0].active_plan.switched_off


def test_minus_one_never_switches_off() -> None:
    machine = Machine()
    settings = {**EXACT, "replan_threshold": 9.0, "min_gain": -1.0}
    ranks = Ranks(ALONE, duration_ms=machine, **settings)
    ranks.run(1, 9)
    machine.freezing_saves = 0.0
    ranks.run(10, 28)
    assert ranks.controllers[0].active_plan.switched_off is None
    assert ranks.controllers[0].step.phase is Phase.STABLE


def test_a_plan_that_promises_too_little_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ranks = Ranks(ORDER, **{**EXACT, "min_gain": 5.0})
    ranks.run(1, 14)
    (line,) = set(messages(caplog, "switched off"))
    assert line.startswith("Freezing is switched off from step 7 on: the plan promises +")
    assert line.endswith("under min_gain (5)")
    for rank, controller in enumerate(ranks.controllers):
        assert controller.plan is not None, "for the report"
        assert list(ranks.masks(rank, rank))[3 * 6 :] == [{}] * (3 * 8)
        assert controller.step.phase is Phase.OFF


def test_a_chosen_cap_must_make_up_for_the_steps_that_it_costs() -> None:
    """Freezing goes on to save a part: more than min_gain asks for, less than the steps cost."""
    machine = Machine()
    settings = {
        **EXACT, "replan_threshold": 9.0, "skip_input_grads": "off", "first_stage": "per_tensor",
    }  # fmt: skip
    chosen = Ranks(ALONE, duration_ms=machine, **{**settings, "max_freeze_ratio": "auto"})
    given = Ranks(ALONE, duration_ms=machine, **{**settings, "max_freeze_ratio": 0.25})
    for ranks in (chosen, given):
        machine.freezing_saves = 1.25  # with less, no cap pays where ranks never wait
        ranks.run(1, 16)
        assert ranks.controllers[0].active_plan.switched_off is None, (
            "the gain makes up for the steps"
        )
        machine.freezing_saves = 0.5
        ranks.run(17, 24)
    plans = [ranks.controllers[0].plan for ranks in (chosen, given)]
    assert plan_to_json(plans[0]) == plan_to_json(plans[1]), "0.25 is the cap that was chosen"
    reason = chosen.controllers[0].active_plan.switched_off
    assert reason is not None
    # A mean ratio of 0.25: the square root of 1 / (1 - 0.25).
    assert "for 1.15 times the steps to a loss, under min_gain (0.02) 2 times in a row" in reason
    assert given.controllers[0].active_plan.switched_off is None


@pytest.mark.parametrize(("scatter", "is_off"), [(0.01, True), (0.8, False)])
def test_a_gain_that_noise_may_hide_is_not_given_up(scatter: float, is_off: bool) -> None:
    """Freezing saves nothing, which batches that differ by so much cannot tell from a little."""
    machine, rng = Machine(), np.random.default_rng(1)
    noise = [1.0]

    def duration_ms(action: Action, fraction: float) -> float:
        if action == first:
            noise[0] = 1.0 + is_noisy * scatter * rng.random()
        return machine(action, fraction) * noise[0]

    first, is_noisy = ALONE.ranks[0][0], False
    settings = {**EXACT, "replan_threshold": 9.0, "skip_input_grads": "off"}
    ranks = Ranks(ALONE, duration_ms=duration_ms, **settings)
    ranks.run(1, 12)
    machine.freezing_saves, is_noisy = 0.0, True
    ranks.run(13, 24)
    assert (ranks.controllers[0].active_plan.switched_off is not None) is is_off
