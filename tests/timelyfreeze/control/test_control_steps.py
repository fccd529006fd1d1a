"""Steps that freeze nothing among those that freeze: what runs in them, and what they tell."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.timelyfreeze.helpers.ranks import PHASES, Ranks, linear_ms
from timelyfreeze.control.report import FreezeReport, Reporter
from timelyfreeze.schedule.order import Action, one_f_one_b_order
from timelyfreeze.settings.phases import Phase

ORDER = one_f_one_b_order(2, 4)
EVERY = 6
FIRST = PHASES.last_ramp_step + EVERY // 3 + 1


@pytest.mark.parametrize("name", ["1F1B", "v_shape"])
def test_a_control_step_freezes_nothing_and_those_around_it_do(name: str) -> None:
    order = ORDER if name == "1F1B" else hand_order(name)
    ranks = Ranks(order, control_every=EVERY)
    ranks.run(1, FIRST - 1)
    for step in range(FIRST, FIRST + EVERY + 1):
        ranks.run(step, step)
        is_control = step in (FIRST, FIRST + EVERY)
        for rank, controller in enumerate(ranks.controllers):
            assert (controller.step.phase is Phase.CONTROL) is is_control
            assert controller.step.lasting_phase is Phase.STABLE, "the stable phase goes on"
            stages = [s for s, r in enumerate(order.stage_to_rank) if r == rank]
            frozen = [any(list(ranks.masks(rank, stage))[-1]) for stage in stages]
            assert not (is_control and any(frozen))
    plan = ranks.controllers[0].plan
    assert plan is not None
    assert plan.ratios.max() > 0.0


def test_its_batches_are_told_apart_and_take_what_unfrozen_ones_took() -> None:
    ranks = Ranks(ORDER, control_every=EVERY)
    ranks.run(1, PHASES.last_monitor_step)
    before = ranks.collect()[0].batch_ms[Phase.UPPER_BOUND]
    ranks.run(PHASES.last_monitor_step + 1, FIRST - 1)
    ranks.collect()
    ranks.run(FIRST, FIRST)
    controller = ranks.controllers[0]
    assert controller.plan is not None
    assert controller.expected_batch_ms() == pytest.approx(controller.plan.unfrozen_batch_ms)
    ranks.run(FIRST + 1, FIRST + 1)
    for metrics in ranks.collect():
        assert metrics.batch_ms[Phase.CONTROL] == pytest.approx([before[0]] * 3)
        assert np.mean(metrics.batch_ms[Phase.STABLE]) < 0.9 * before[0]


def judged(
    duration_ms: Callable[[Action, float], float], control_every: int, replan_every: int
) -> Ranks:
    """Ranks whose plan is switched off where it does not pay, and never made anew."""
    return Ranks(
        ORDER,
        duration_ms=duration_ms,
        control_every=control_every,
        replan_every=replan_every,
        replan_threshold=100.0,
        min_gain=0.02,
    )


@pytest.mark.parametrize("control_every", [0, EVERY])
def test_freezing_is_judged_by_control_steps_where_there_are_any(control_every: int) -> None:
    """What the plan freezes becomes slower, frozen or not: it pays as before.

    By the actions that are not frozen, whose times are as planned, it would not.
    """
    slow, frozen = [1.0], set[Action]()

    def duration_ms(action: Action, fraction: float) -> float:
        return linear_ms(action, fraction) * (slow[0] if action in frozen else 1.0)

    ranks = judged(duration_ms, control_every, replan_every=EVERY)
    ranks.run(1, FIRST - 2)
    active = ranks.controllers[0].active_plan
    assert active.plan is not None
    frozen |= {action for action in active.dag.actions if active.plan.ratio_of(action) > 0.0}
    slow[0] = 6.0
    ranks.run(FIRST - 1, FIRST + 3 * EVERY)
    assert (active.switched_off is not None) is (control_every == 0)


def test_freezing_is_not_given_up_because_control_steps_met_a_faster_machine() -> None:
    speed = [1.0]
    ranks = judged(
        lambda action, fraction: speed[0] * linear_ms(action, fraction),
        EVERY,
        replan_every=2 * EVERY,
    )
    for step in range(1, FIRST + 8 * EVERY):
        is_control = step >= FIRST and (step - FIRST) % EVERY == 0
        speed[0] = 3.0 if step > PHASES.last_ramp_step and not is_control else 1.0
        ranks.run(step, step)
    active = ranks.controllers[0].active_plan
    assert active.plan is not None
    assert active.switched_off is None


def test_forwards_of_control_steps_tell_the_speed_of_the_machine_too() -> None:
    drift = [1.0]
    ranks = Ranks(
        ORDER,
        duration_ms=lambda action, fraction: drift[0] * linear_ms(action, fraction),
        control_every=EVERY,
    )
    ranks.run(1, FIRST - 1)
    ranks.collect()
    drift[0] = 3.0
    ranks.run(FIRST, FIRST)
    assert [found.drift for found in ranks.collect()] == [None, None], "no frozen batch"
    ranks.run(FIRST + 1, FIRST + EVERY)
    assert [found.drift for found in ranks.collect()] == pytest.approx([3.0, 3.0], rel=0.02)


@pytest.mark.parametrize("is_collected_before", [True, False])
def test_a_slower_machine_shows_in_stable_batches_alone(is_collected_before: bool) -> None:
    """Batches of other phases in the same collection do not hide it."""
    drift = [1.0]
    ranks = Ranks(
        ORDER, duration_ms=lambda action, fraction: drift[0] * linear_ms(action, fraction)
    )
    last = PHASES.last_ramp_step
    ranks.run(1, last)
    if is_collected_before:
        assert [metrics.drift for metrics in ranks.collect()] == [None, None]
    drift[0] = 1.5
    ranks.run(last + 1, last + 4)
    assert [f.drift for f in ranks.collect()] == pytest.approx([1.5, 1.5], rel=0.02)


def test_a_report_tells_the_error_of_a_plan_without_what_the_machine_has_become() -> None:
    drift = [1.0]
    ranks = Ranks(
        ORDER, duration_ms=lambda action, fraction: drift[0] * linear_ms(action, fraction)
    )
    reporters = [Reporter(controller) for controller in ranks.controllers]

    def report_after(first: int, last: int) -> FreezeReport:
        ranks.run(first, last)
        return ranks.on_all(lambda rank: reporters[rank].report(last))[0]

    stable = PHASES.last_ramp_step + 1
    early = report_after(1, stable - 1)
    assert early.stable_as_timed_ms is None
    assert "it missed by" not in str(early)
    drift[0] = 1.25
    slow = report_after(stable, stable + 3)
    assert slow.planned_batch_ms is not None
    assert slow.measured_frozen_ms is not None
    assert slow.stable_as_timed_ms == pytest.approx(slow.measured_frozen_ms / 1.25, rel=0.02)
    over = slow.stable_as_timed_ms / slow.planned_batch_ms - 1.0
    assert f"; {over:+.1%} at the speed of the machine when actions were timed" in str(slow)
    drift[0] = 1.6
    slower = report_after(stable + 4, stable + 9)
    assert slower.measured_frozen_ms is not None
    assert slower.measured_frozen_ms > 1.1 * slow.measured_frozen_ms
    assert slower.stable_as_timed_ms == pytest.approx(slow.stable_as_timed_ms, rel=0.05)
