"""Controllers that go on from a checkpoint, with a plan, a policy or both, on pretended ranks."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.timelyfreeze.helpers.ranks import N_TENSORS, PHASES, Ranks, without_stable_times
from tests.timelyfreeze.helpers.stub_policy import StubPolicy
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.policies.policy import Check, Metric
from timelyfreeze.schedule.order import ScheduleOrder, one_f_one_b_order
from timelyfreeze.settings.phases import PhaseSchedule

pytestmark = pytest.mark.slow

ORDER = one_f_one_b_order(2, 4)
ORDERS = pytest.mark.parametrize("order", [ORDER, hand_order("v_shape")], ids=["1F1B", "v_shape"])
UNPLANNED = PhaseSchedule.unplanned(2)
BOTH = pytest.mark.parametrize("phases", [UNPLANNED, PHASES], ids=["alone", "planned"])
FROZEN = np.random.default_rng(0).random(2 * N_TENSORS) < 0.5


def with_policy(
    phases: PhaseSchedule = PHASES, kind: type[StubPolicy] = StubPolicy, **options: str
) -> Ranks:
    return Ranks(ORDER, policy=kind(lambda check: FROZEN), phases=phases, **options)


@cache
def undisturbed(
    make: Callable[..., Ranks], *args: Any, last_step: int
) -> tuple[Ranks, dict[int, dict[str, Any]], float]:
    """A run at one go, what a checkpoint held after each step, and its average freeze ratio."""
    ranks, states = make(*args), {}
    for step in range(1, last_step + 1):
        ranks.run(step, step)
        states[step] = ranks.saved()
    return ranks, states, ranks.collect()[0].average_freeze_ratio


def resumed(
    make: Callable[..., Ranks], *args: Any, stopped_at: int, last_step: int
) -> tuple[Ranks, Ranks]:
    """Run at one go, and with a stop; return both, whose masks are the same."""
    whole, states, average = undisturbed(make, *args, last_step=last_step)
    after = make(*args)
    after.load(copy.deepcopy(states[stopped_at]))
    assert after.saved() == states[stopped_at], "what was loaded can be saved again"
    after.run(stopped_at + 1, last_step)
    for rank, stages in enumerate(whole.stages):
        for stage in stages:
            given = list(whole.masks(rank, stage))
            assert list(after.masks(rank, stage)) == given[3 * stopped_at :]
    assert without_stable_times(after.saved()) == without_stable_times(states[last_step])
    assert after.collect()[0].average_freeze_ratio == average > 0.0
    return whole, after


def planned(order: ScheduleOrder, monitoring: str) -> Ranks:
    return Ranks(order, phases=replace(PHASES, monitoring=monitoring))


@pytest.mark.parametrize("stopped_at", [1, 3, 5, 6, 8, 11])
@pytest.mark.parametrize("monitoring", ["halves", "mixed"])
@ORDERS
def test_a_resumed_run_freezes_as_one_that_never_stopped(
    order: ScheduleOrder, monitoring: str, stopped_at: int
) -> None:
    whole, after = resumed(planned, order, monitoring, stopped_at=stopped_at, last_step=13)
    for mine, theirs in zip(whole.controllers, after.controllers, strict=True):
        assert plan_to_json(mine.plan) == plan_to_json(theirs.plan)
        assert mine.active_plan.order == theirs.active_plan.order
    assert any(any(m) for given in whole.masks(1, order.n_stages // 2) for m in given.values())


def by_metrics(n_stages: int) -> StubPolicy:
    """Decides by what was measured, so that a run without the meter's state would go astray."""

    def choose(check: Check) -> np.ndarray:
        if not check.metrics:
            return np.zeros(n_stages * N_TENSORS, dtype=np.bool_)
        return check.metrics[Metric.ABS_SUM] < 12.0 * check.number

    return StubPolicy(choose, check_interval=3)


def deciding(order: ScheduleOrder, phases: PhaseSchedule) -> Ranks:
    return Ranks(order, policy=by_metrics(order.n_stages), phases=phases)


@pytest.mark.parametrize("stopped_at", [1, 2, 3, 4, 5, 6, 8, 11])
@BOTH
@ORDERS
def test_a_resumed_policy_decides_as_one_that_never_stopped(
    order: ScheduleOrder, phases: PhaseSchedule, stopped_at: int
) -> None:
    whole, after = resumed(deciding, order, phases, stopped_at=stopped_at, last_step=14)
    for rank, stages in enumerate(whole.stages):
        for stage in stages:
            cut = whole.stages[rank][stage].without_input_grads[3 * stopped_at :]
            assert after.stages[rank][stage].without_input_grads == cut
    for checks in whole.checks:
        assert checks.decision.memory["numbers"][-1] >= 3
        assert 0 < checks.decision.frozen.sum() < order.n_stages * N_TENSORS


def test_scores_are_saved_as_tensors_under_keys_of_their_parameters() -> None:
    ranks = with_policy(first_stage="per_tensor")
    begun = ranks.saved().keys()
    ranks.run(1, 4)
    names = [name for stages in ranks.stages for s in stages.values() for name in s.parameter_names]
    assert ranks.saved().keys() == {"rank_0", "rank_1", *(f"score.steps.{n}" for n in names)}
    assert begun == ranks.saved().keys(), "at every step"
    assert json.loads(ranks.saved()["rank_0"]).keys() == {
        "applied", "front", "planner", "policy", "tally",
    }  # fmt: skip


def moving(n_microbatches: int) -> Ranks:
    ranks = Ranks(
        one_f_one_b_order(2, n_microbatches), policy=StubPolicy(lambda check: FROZEN), phases=PHASES
    )
    for controller in ranks.controllers:
        controller.state.moves = True
    return ranks


def plans_of(ranks: Ranks) -> list[str | None]:
    plans = [controller.plan for controller in ranks.controllers]
    return [None if plan is None else plan_to_json(plan) for plan in plans]


def test_a_run_that_moves_leaves_its_plan_behind_and_makes_another() -> None:
    before, after, never_moved = moving(4), moving(8), moving(8)
    before.run(1, 12)
    after.load(before.saved())
    assert plans_of(after) == [None, None]
    after.run(13, 16)
    never_moved.run(1, 6)
    assert plans_of(after) == plans_of(never_moved) != plans_of(before)
    names = ["upper_bound"] * 2 + ["lower_bound"] * 2 + ["ramp"] * 4 + ["stable"]
    for step, name in enumerate(names, 13):
        assert after.controllers[0].phases.phase(step).value == name


@pytest.mark.parametrize("stopped_at", [12, 14, 18])
def test_resumed_in_another_pipeline_it_goes_back_to_its_plan(stopped_at: int) -> None:
    """As a run does that was killed after a move, and begins in the configured pipeline."""
    start, moved = moving(8), moving(4)
    start.run(1, 10)
    moved.load(start.saved())
    moved.run(11, stopped_at)
    configured, back = moving(8), moving(4)
    configured.load(moved.saved())
    assert plans_of(configured) == [None, None]
    back.load(configured.saved())
    for name in ("rank_0", "rank_1"):  # sums of the freeze ratio are handed out again
        mine, theirs = (json.loads(ranks.saved()[name]) for ranks in (back, moved))
        assert mine | {"applied": None} == theirs | {"applied": None}
    for ranks in (moved, back):
        ranks.run(stopped_at + 1, 20)
    for rank, stages in enumerate(moved.stages):
        for stage in stages:
            masks = list(back.masks(rank, stage))
            assert list(moved.masks(rank, stage))[-len(masks) :] == masks
    assert plans_of(back) == plans_of(moved) != [None, None]


def test_before_the_end_of_warm_up_phases_stay_where_they_are() -> None:
    before, after = moving(4), moving(8)
    before.run(1, 2)
    after.load(before.saved())
    after.run(3, 3)
    assert after.controllers[0].phases == replace(PHASES, control_every=20)


def test_a_run_that_does_not_move_refuses_a_plan_of_another_pipeline() -> None:
    before, after = moving(4), moving(8)
    before.run(1, 8)
    for controller in after.controllers:
        controller.state.moves = False
    with pytest.raises(ValueError, match=r"are those of 4 microbatches in a batch, this run has 8"):
        after.load(before.saved())


METHODS: dict[str, Callable[[], Ranks]] = {
    "planner": lambda: Ranks(ORDER),
    "policy": lambda: with_policy(UNPLANNED),
    "planner, policy": with_policy,
}


@pytest.mark.parametrize("resumed", METHODS)
@pytest.mark.parametrize("saved", METHODS)
def test_a_checkpoint_of_another_method_is_refused(saved: str, resumed: str) -> None:
    state = METHODS[saved]().saved()
    ranks = METHODS[resumed]()
    if saved == resumed:
        ranks.load(state)
        return
    with pytest.raises(
        ValueError,
        match=r"the checkpoint was saved under another method \(it has the state of: "
        rf"{saved}\); resume with the same one, or, "
        "to begin freezing again, load the checkpoint without it",
    ):
        ranks.load(state)


class OtherPolicy(StubPolicy):
    """Another method that could be wrong for the first."""


@BOTH
def test_a_checkpoint_of_another_policy_is_refused(phases: PhaseSchedule) -> None:
    with pytest.raises(ValueError, match=r"has a decision of StubPolicy.*this run has OtherPolicy"):
        with_policy(phases, OtherPolicy).load(with_policy(phases).saved())
