"""Times that move in the stable phase, and plans that are made again for them."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import timelyfreeze.control.plans.planner as planner_module
from tests.timelyfreeze.control.test_solver_delay import HereAtOnce
from tests.timelyfreeze.helpers.moving_times import ALONE, EXACT, ORDER, Machine, messages
from tests.timelyfreeze.helpers.pipelines import simulate
from tests.timelyfreeze.helpers.ranks import Ranks, warnings, without_stable_times
from timelyfreeze.control.plans import solver_job
from timelyfreeze.control.plans.replanning import (
    DriftCheck,
    check_drift,
    drift_text,
)
from timelyfreeze.planning.lp import LpError, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios, plan_to_json
from timelyfreeze.planning.solution import Solution
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ActionKind, ScheduleOrder
from timelyfreeze.settings.phases import Phase, PhaseSchedule
from timelyfreeze.timing.batches import RankBatches
from timelyfreeze.timing.bounds import DurationBounds


def bounds_of(ranks: Ranks) -> DurationBounds:
    bounds = ranks.controllers[0].active_plan.bounds
    assert bounds is not None
    return bounds


# -- a plan made again -----------------------------------------------------------------------------


def test_nothing_happens_while_times_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ranks = Ranks(ORDER, **EXACT)
    ranks.run(1, 8)
    before = [exchange.n_gathers for exchange in ranks.exchanges]
    ranks.run(9, 20)
    assert [e.n_gathers - n for e, n in zip(ranks.exchanges, before, strict=True)] == [3, 3]
    assert [len(solved) for solved in ranks.solved] == [1, 1]
    assert not messages(caplog, "moved")
    assert not messages(caplog, "switched off")


@pytest.mark.parametrize("first_stage", ["all_or_nothing", "per_tensor"])
def test_times_that_moved_bring_a_plan_for_the_times_there_are(
    first_stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine()
    # A former plan may have fronts by chance and stay for them.
    settings = {
        **EXACT,
        "first_stage": first_stage,
        "batches_per_step": 6,
        "skip_input_grads": "off",
    }
    ranks = Ranks(ORDER, duration_ms=machine, n_replicas=2, **settings)
    ranks.run(1, 12)
    former = ranks.controllers[0].plan
    machine.drift[1] = 2.0
    ranks.run(13, 15)
    assert ranks.controllers[0].plan is former
    ranks.run(16, 16)
    plans = {plan_to_json(c.plan) for c in ranks.controllers if c.plan is not None}
    assert len(plans) == 1
    assert plan_to_json(former) not in plans
    assert [len(solved) for solved in ranks.solved] == [2] * 4
    dag, bounds = ranks.controllers[0].active_plan.dag, bounds_of(ranks)
    for i, action in enumerate(dag.actions):
        # Masks of whole tensors hit a ratio only nearly, so a pooled time is a little off.
        assert bounds.max_ms[i] == pytest.approx(machine(action, 0.0), rel=0.05)
        assert bounds.min_ms[i] == pytest.approx(machine(action, 1.0), rel=0.05)
    again = solve_freeze_ratios(
        dag,
        bounds,
        max_freeze_ratio=0.8,
        whole_stages=(0,) if first_stage == "all_or_nothing" else (),
    )
    assert ranks.controllers[0].plan.ratios == pytest.approx(again.ratios)
    lines = messages(caplog, "Times have moved")
    assert len(lines) == 4, "one for each rank, of which one is shown"
    assert len(set(lines)) == 1
    assert "of stage 1 +100.0%" in lines[0]
    assert "stage 0" not in lines[0]
    caplog.clear()
    ranks.run(17, 24)
    assert not messages(caplog, "Times have moved"), "what has moved once is known"
    for rank in range(4):
        assert ranks.controllers[rank].step.phase is Phase.STABLE


def test_a_move_within_the_fraction_is_left_alone() -> None:
    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, **EXACT, replan_threshold=0.25)
    ranks.run(1, 12)
    machine.drift[0] = 1.2
    ranks.run(13, 20)
    assert len(ranks.solved[0]) == 1
    machine.drift[0] = 0.7  # faster counts as well
    ranks.run(21, 24)
    assert len(ranks.solved[0]) == 2


def test_zero_never_looks(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, **{**EXACT, "replan_every": 0})
    ranks.run(1, 9)
    machine.drift[0] = 3.0
    ranks.run(10, 24)
    assert [len(solved) for solved in ranks.solved] == [1, 1]
    assert [exchange.n_gathers for exchange in ranks.exchanges] == [1, 1]


def test_too_few_passes_are_not_judged() -> None:
    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, batches_per_step=1, **EXACT)
    ranks.run(1, 8)
    machine.drift[0] = 3.0
    ranks.run(9, 15)
    assert len(ranks.solved[0]) == 1, "4 batches were there at step 12"
    ranks.run(16, 16)
    assert len(ranks.solved[0]) == 2


def test_a_plan_that_is_solved_meanwhile_comes_after_the_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solver_job, "BackgroundCall", HereAtOnce)
    machine = Machine()
    phases = PhaseSchedule(2, 6, 10)
    settings = {**EXACT, "phases": phases, "solver_delay_steps": 3, "replan_every": 2}
    ranks, stopped, resumed = (Ranks(ORDER, duration_ms=machine, **settings) for _ in range(3))
    ranks.run(1, 12)
    stopped.run(1, 12)
    machine.drift[1] = 2.0
    ranks.run(13, 16)  # compared at 14
    stopped.run(13, 15)
    resumed.load(stopped.saved())
    assert resumed.saved() == stopped.saved()
    assert len(ranks.solved[0]) == 1
    ranks.run(17, 20)  # compared at 20, with batches under the new plan alone
    resumed.run(16, 20)
    assert len(ranks.solved[0]) == 2
    assert ranks.controllers[0].planner._call is None
    for rank in (0, 1):
        assert list(resumed.masks(rank, rank)) == list(ranks.masks(rank, rank))[3 * 15 :]
    assert without_stable_times(resumed.saved()) == without_stable_times(ranks.saved())


def test_a_resumed_run_makes_the_same_plan_anew() -> None:
    machine = Machine()
    whole, before, after = (Ranks(ORDER, duration_ms=machine, **EXACT) for _ in range(3))
    for ranks in (whole, before):
        machine.drift[1] = 1.0
        ranks.run(1, 9)
        machine.drift[1] = 2.0
        ranks.run(10, 11 if ranks is whole else 10)
    state = before.saved()
    after.load(state)
    after.run(11, 11)
    for ranks in (whole, after):
        ranks.run(12, 18)
        assert [len(solved) for solved in ranks.solved] == [2, 2]
    assert ranks.solved[0][-1][0].ratios == pytest.approx(whole.solved[0][-1][0].ratios)
    again = Ranks(ORDER, **EXACT)
    again.load(whole.saved())
    assert plan_to_json(again.controllers[1].plan) == plan_to_json(whole.controllers[1].plan)
    assert np.array_equal(bounds_of(again).max_ms, bounds_of(whole).max_ms)


def slowed(
    monkeypatch: pytest.MonkeyPatch, part: float, **settings: Any
) -> tuple[Ranks, FreezePlan]:
    """Ranks that took twice as long, for which a plan was made with ``part`` of the former ratios.

    And the former plan.
    """

    def solve(order: ScheduleOrder, bounds: DurationBounds, **kwargs: Any) -> Solution:
        dag = build_dag(order)
        plan = plan_from_ratios(dag, bounds, part * former.ratios)
        return Solution(order, dag, bounds, replace(plan, steps_factor=1.0))

    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, **EXACT, **settings)
    ranks.run(1, 9)
    former = ranks.controllers[0].plan
    monkeypatch.setattr(planner_module, "solve_from_bounds", solve)
    machine.drift = {0: 2.0, 1: 2.0}
    ranks.run(10, 12)
    return ranks, former


def test_a_former_plan_that_is_faster_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks, former = slowed(monkeypatch, part=0.0)
    for controller in ranks.controllers:
        assert np.array_equal(controller.plan.ratios, former.ratios)
        assert controller.plan.batch_ms == pytest.approx(2 * former.batch_ms, rel=0.05)
    assert messages(caplog, "Times have moved")[0].endswith("the former one stays")
    caplog.clear()
    ranks.run(13, 20)
    assert not messages(caplog, "Times have moved"), "its bounds have followed"
    assert ranks.controllers[0].active_plan.switched_off is None


def test_where_the_cap_is_chosen_the_time_to_a_loss_decides_which_plan_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan made again freezes half as much: its batch is longer, a loss comes sooner."""
    ranks, former = slowed(monkeypatch, part=0.5, max_freeze_ratio="auto")
    for controller in ranks.controllers:
        assert controller.plan.batch_ms > 2 * former.batch_ms
        assert controller.plan.ratios == pytest.approx(former.ratios / 2)


def test_where_solving_anew_fails_the_plan_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise LpError("no optimum", status="Time limit reached")

    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, **EXACT)
    ranks.run(1, 9)
    plan = ranks.controllers[0].plan
    monkeypatch.setattr(planner_module, "solve_from_bounds", failing)
    machine.drift[1] = 2.0
    ranks.run(10, 13)
    assert ranks.controllers[0].plan is plan
    assert ranks.controllers[0].planner.failure is None
    (message,) = warnings(caplog)
    assert message == (
        "Times have moved, but solving again brought no plan (no optimum); the one in force stays"
    )


# -- what batches say ------------------------------------------------------------------------------


def test_gain_is_that_over_batches_that_moved_with_what_is_not_frozen() -> None:
    """Frozen backwards that save nothing must not pass for a slower machine."""
    dag = build_dag(ALONE)
    low = np.array([1.0 if a.kind.freezable else 2.0 for a in dag.actions])
    high = np.array([4.0 if a.kind.freezable else 2.0 for a in dag.actions])
    bounds = DurationBounds(low, high)
    ratios = [1.0 if str(a) in ("0B0", "1B0") else 0.0 for a in dag.actions]
    plan = plan_from_ratios(dag, bounds, ratios)
    assert (plan.unfrozen_batch_ms, plan.batch_ms) == (24.0, 18.0)

    def batches(factor: float, frozen_ms: float) -> RankBatches:
        own = {
            a: factor * (frozen_ms if r else high[dag.index[a]])
            for a, r in zip(dag.actions, ratios, strict=True)
        }
        return RankBatches((("stable", sum(own.values())),) * 3, own)

    now: Any = SimpleNamespace(dag=dag, bounds=bounds, plan=plan, n_processors=None)

    def drift_checked(*ranks: RankBatches) -> DriftCheck:
        return check_drift(now, bounds, ranks)

    as_planned = drift_checked(batches(1.0, 1.0))
    assert (as_planned.batch_ms, as_planned.unfrozen_batch_ms) == (18.0, 24.0)
    assert as_planned.gain == pytest.approx(24 / 18 - 1)
    slower = drift_checked(batches(1.5, 1.0), batches(1.0, 1.0))
    assert slower.gain == pytest.approx(24 / 18 - 1)
    assert slower.unfrozen_batch_ms == pytest.approx(36.0), "the slower replica counts"
    in_vain = drift_checked(batches(1.0, 4.0))
    assert in_vain.gain == pytest.approx(0.0)
    assert in_vain.drift[0, ActionKind.FULL_BACKWARD] == 1.0, "what is not frozen weighs more"


def test_drifts_are_told() -> None:
    drift = {(0, ActionKind.FORWARD): 1.0, (1, ActionKind.FULL_BACKWARD): 0.875}
    assert (
        drift_text({**drift, (2, ActionKind.FORWARD): 1.5})
        == "F of stage 2 +50.0%, B of stage 1 -12.5%"
    )


def test_a_moved_pipeline_is_predicted_rightly() -> None:
    machine = Machine()
    ranks = Ranks(ORDER, duration_ms=machine, **EXACT, first_stage="per_tensor")
    ranks.run(1, 9)
    machine.drift = {0: 1.5, 1: 1.5}
    ranks.run(10, 16)
    plan = ranks.controllers[0].plan
    played = simulate(ORDER, lambda action: machine(action, plan.ratio_of(action)))
    assert plan.batch_ms == pytest.approx(max(end for _, end in played.values()), rel=0.03)
