import json
import logging
import statistics
from typing import Any

import numpy as np
import pytest

import timelyfreeze.controller as controller_module
from tests.timelyfreeze.pipelines import hand_order, simulate
from tests.timelyfreeze.ranks import PHASES, Ranks, linear_ms
from timelyfreeze.actions import Action, parse_action
from timelyfreeze.lp import LpError
from timelyfreeze.order import ScheduleOrder, parse_order
from timelyfreeze.phases import Phase
from timelyfreeze.plan import plan_to_json
from timelyfreeze.schedules import gpipe_order, one_f_one_b_order
from timelyfreeze.settings import FreezeSettings

ORDER = one_f_one_b_order(2, 4)
LAST_MONITOR_STEP = PHASES.last_monitor_step


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def all_frozen(masks: dict[int, list[bool]], n_microbatches: int = 4) -> bool:
    return set(masks) == set(range(n_microbatches)) and all(all(m) for m in masks.values())


# -- phases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1F1B", "zero_bubble", "v_shape", "interleaved"])
def test_monitoring_freezes_nothing_and_then_everything(name: str) -> None:
    order = ORDER if name == "1F1B" else hand_order(name)
    ranks = Ranks(order)
    ranks.run(1, LAST_MONITOR_STEP)
    for stage, rank in enumerate(order.stage_to_rank):
        given = list(ranks.masks(rank, stage))
        assert len(given) == 3 * LAST_MONITOR_STEP
        assert given[: 3 * 4] == [{}] * 12  # warm-up and upper bound
        assert all(all_frozen(masks, order.n_microbatches) for masks in given[3 * 4 :])
        assert ranks.stages[rank][stage].masks == {}, "no mask may outlive its pass"


def test_the_plan_applies_by_eq_9() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, LAST_MONITOR_STEP)
    controller = ranks.controllers[1]
    plan = controller.plan
    assert plan is not None
    freezable = [a for a in controller.dag.actions if a.kind.freezable]
    assert any(plan.ratio_of(action) > 0 for action in freezable)
    shares = {7: 0.25, 8: 0.5, 9: 0.75, 10: 1.0, 11: 1.0, 500: 1.0}
    for step, share in shares.items():
        controller.begin_step(step)
        assert controller.phase is (Phase.RAMP if step <= 10 else Phase.STABLE)
        for action in freezable:
            assert controller.planned_ratio(action) == pytest.approx(share * plan.ratio_of(action))
        means = {stage: share * r for stage, r in plan.stage_mean_ratios().items()}
        assert controller.expected_stage_ratios() == pytest.approx(means)


@pytest.mark.parametrize("first_stage", ["all_or_nothing", "keep_chain"])
def test_masks_follow_the_plan_on_average(first_stage: str) -> None:
    ranks = Ranks(ORDER, first_stage=first_stage, passes_per_step=40, max_freeze_ratio=0.6)
    ranks.run(1, 13)
    plan = ranks.controllers[0].plan
    assert plan is not None
    fractions = 0
    for rank in (0, 1):
        stable = list(ranks.masks(rank, rank))[10 * 40 :]
        for microbatch in range(4):
            ratio = plan.ratio_of(parse_action(f"{rank}B{microbatch}"))
            drawn = [np.mean(masks.get(microbatch, [False])) for masks in stable]
            fractions += 0.0 < ratio < 1.0
            if rank == 0 and first_stage == "all_or_nothing":
                assert set(drawn) <= {0.0, 1.0}
                assert statistics.mean(drawn) == pytest.approx(ratio, abs=0.16)
            else:
                # A draw never misses the ratio by more than one of 12 equal tensors.
                assert all(abs(share - ratio) < 1 / 12 + 1e-9 for share in drawn)
                assert statistics.mean(drawn) == pytest.approx(ratio, abs=0.03)
    assert fractions > 0, "a plan of zeros and ones alone would test little"


def test_planned_and_applied_ratios_meet_in_the_collected_figures() -> None:
    ranks = Ranks(ORDER, first_stage="keep_chain", passes_per_step=50)
    ranks.run(1, 12)
    figures = ranks.collect()
    assert figures[0] == figures[1]
    wanted = ranks.controllers[0].expected_stage_ratios()
    assert max(wanted.values()) > 0.1
    assert figures[0].applied_stage_ratios == pytest.approx(wanted, abs=0.03)


def test_the_average_freeze_ratio_is_the_mean_of_every_mask_so_far() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, 12)
    every = [
        np.mean(masks.get(microbatch, [False]))
        for rank in (0, 1)
        for masks in ranks.masks(rank, rank)
        for microbatch in range(4)
    ]
    assert len(every) == 2 * 12 * 3 * 4
    for figures in ranks.collect():
        assert figures.average_freeze_ratio == pytest.approx(statistics.mean(every))


def test_replicas_and_reruns_draw_the_same_masks_and_seeds_differ() -> None:
    def given(**settings: Any) -> list[list[dict[int, list[bool]]]]:
        ranks = Ranks(ORDER, n_replicas=2, first_stage="keep_chain", **settings)
        ranks.run(1, 12)
        return [list(ranks.masks(rank, rank % 2)) for rank in range(4)]

    first, again, other = given(), given(), given(seed=43)
    assert first[:2] == first[2:]
    assert first == again
    assert first[1] != other[1]
    assert first[1][-1] != first[1][-2], "each pass draws anew"


def test_a_pass_that_fails_leaves_no_mask_and_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    disturbed, calm = Ranks(ORDER), Ranks(ORDER)
    for ranks in (disturbed, calm):
        ranks.run(1, 5)
    controller = disturbed.controllers[1]
    controller.begin_step(6)
    with pytest.raises(RuntimeError, match="1B2 failed"):
        disturbed.one_pass(1, fail_at=parse_action("1B2"))
    assert disturbed.stages[1][1].masks == {}
    for ranks in (disturbed, calm):
        ranks.run(6, LAST_MONITOR_STEP)
    plans = [ranks.controllers[0].plan for ranks in (disturbed, calm)]
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])


# -- solving ---------------------------------------------------------------------------------------


def test_the_plan_is_solved_once_on_rank_0_and_handed_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(ORDER, n_replicas=2)
    solved_at: list[list[int]] = []
    solve = controller_module.solve_from_times

    def counting(*args: Any, **kwargs: Any) -> Any:
        solved_at.append([controller._step for controller in ranks.controllers])
        return solve(*args, **kwargs)

    monkeypatch.setattr(controller_module, "solve_from_times", counting)
    ranks.run(1, LAST_MONITOR_STEP - 1)
    assert [c.plan for c in ranks.controllers] == [None] * 4
    ranks.run(LAST_MONITOR_STEP, 14)
    assert solved_at == [[LAST_MONITOR_STEP] * 4]
    assert [exchange.n_gathers for exchange in ranks.exchanges] == [1] * 4
    plans = [controller.plan for controller in ranks.controllers]
    assert len({plan_to_json(plan) for plan in plans if plan is not None}) == 1
    for controller, calls in zip(ranks.controllers, ranks.solved, strict=True):
        assert calls == [(controller.plan, controller.bounds)]
        assert not controller.plan_missing


def test_bounds_are_what_the_actions_took_in_the_two_halves() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, LAST_MONITOR_STEP)
    for controller in ranks.controllers:
        for i, action in enumerate(controller.dag.actions):
            assert controller.bounds.max_ms[i] == pytest.approx(linear_ms(action, 0.0))
            assert controller.bounds.min_ms[i] == pytest.approx(linear_ms(action, 1.0))


def test_the_plan_keeps_to_the_cap_and_is_as_fast_as_it_says() -> None:
    ranks = Ranks(ORDER, max_freeze_ratio=(0.25, 0.75))
    ranks.run(1, LAST_MONITOR_STEP)
    plan = ranks.controllers[0].plan
    means = plan.stage_mean_ratios()
    assert means[0] <= 0.25 + 1e-9
    assert means[1] <= 0.75 + 1e-9
    played = simulate(ORDER, lambda action: linear_ms(action, plan.ratio_of(action)))
    assert plan.batch_ms == pytest.approx(max(end for _, end in played.values()))
    assert plan.batch_ms < plan.unfrozen_batch_ms


def test_the_first_passes_after_each_change_of_phase_do_not_count() -> None:
    """Had the slow first passes counted, the bounds would be far too long."""
    order = gpipe_order(2, 2)
    ranks = Ranks(order, passes_per_step=1, discard_passes=1)
    slow = {"now": False}

    def duration_ms(action: Action, share: float) -> float:
        return linear_ms(action, share) + (1000.0 if slow["now"] else 0.0)

    ranks.duration_ms = duration_ms
    for step in range(1, LAST_MONITOR_STEP + 1):
        slow["now"] = step in (3, 5)  # the first of each half
        ranks.run(step, step)
    assert max(ranks.controllers[0].bounds.max_ms) < 10.0


def test_predictions_belong_to_the_current_step() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, LAST_MONITOR_STEP - 1)
    controller = ranks.controllers[0]
    assert controller.expected_batch_ms() is None
    ranks.run(LAST_MONITOR_STEP, LAST_MONITOR_STEP)
    plan = controller.plan
    assert controller.expected_batch_ms() == pytest.approx(plan.frozen_batch_ms)
    controller.begin_step(11)
    assert controller.expected_batch_ms() == pytest.approx(plan.batch_ms)
    controller.begin_step(8)
    half = simulate(ORDER, lambda action: linear_ms(action, 0.5 * plan.ratio_of(action)))
    assert controller.expected_batch_ms() == pytest.approx(max(end for _, end in half.values()))


def test_processors_that_ranks_share_reach_plan_and_prediction() -> None:
    alone, shared = Ranks(ORDER), Ranks(ORDER, n_processors=1.0)
    for ranks in (alone, shared):
        ranks.run(1, LAST_MONITOR_STEP)
    work = sum(linear_ms(action, 1.0) for action in alone.controllers[0].dag.actions)
    assert shared.controllers[0].expected_batch_ms() == pytest.approx(work)
    assert alone.controllers[0].expected_batch_ms() < work


def test_backwards_that_freezing_does_not_shorten_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def duration_ms(action: Action, share: float) -> float:
        return linear_ms(action, 0.0 if action.stage == 0 else share)

    ranks = Ranks(ORDER, duration_ms=duration_ms)
    ranks.run(1, LAST_MONITOR_STEP)
    (message, *_) = warnings(caplog)
    assert "Freezing makes 4 of 8 backward actions no faster, as measured (0B0, 0B1" in message
    assert ranks.controllers[1].plan.stage_mean_ratios()[0] == 0.0


# -- failures --------------------------------------------------------------------------------------


def assert_trains_on_unfrozen(ranks: Ranks, first_pass: int) -> None:
    for rank, stages in enumerate(ranks.stages):
        controller = ranks.controllers[rank]
        assert controller.plan is None
        assert controller.plan_missing
        assert set(controller.expected_stage_ratios().values()) == {0.0}
        for stage in stages:
            assert list(ranks.masks(rank, stage))[first_pass:] == [{}] * (12 * 3 - first_pass)


@pytest.mark.parametrize(
    "error",
    [LpError("the program ended with status 'Time limit reached'", status="Time limit reached"),
     ValueError("every action lasts 0 ms")],
)  # fmt: skip
def test_a_failed_solver_means_training_without_freezing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(controller_module, "solve_from_times", failing)
    ranks = Ranks(ORDER)
    ranks.run(1, 10)  # all of the ramp
    messages = warnings(caplog)
    assert len(messages) == 1, "one warning, from rank 0"
    assert set(messages) == {
        "Nothing is frozen: step 7 is past freezing.last_monitor_step (6) and there is no plan "
        f"({error})"
    }
    ranks.run(11, 12)
    assert [controller.failure for controller in ranks.controllers] == [str(error)] * 2
    assert ranks.solved == [[], []]
    assert_trains_on_unfrozen(ranks, 3 * LAST_MONITOR_STEP)
    assert ranks.collect()[0].batch_ms.keys() >= {Phase.RAMP}


def test_an_unforeseen_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(controller_module, "solve_from_times", failing)
    ranks = Ranks(gpipe_order(1, 2))
    with pytest.raises(KeyError, match="a defect of ours"):
        ranks.run(1, LAST_MONITOR_STEP)


def test_a_run_that_begins_after_the_upper_bound_freezes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(ORDER)
    ranks.run(5, 10)
    for controller in ranks.controllers:
        assert controller.plan is None
        assert "rank 0 has no actions" in controller.failure
    assert "and there is no plan (rank 0 has no actions" in warnings(caplog)[0]


def test_a_run_that_begins_after_monitoring_says_why_nothing_is_frozen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(ORDER)
    ranks.run(20, 20)
    assert set(warnings(caplog)) == {
        "Nothing is frozen: step 20 is past freezing.last_monitor_step (6) and there is no plan "
        "(the run did not pass through the monitoring steps)"
    }


# -- another order than declared -------------------------------------------------------------------


def test_the_plan_is_made_for_the_order_that_ran(caplog: pytest.LogCaptureFixture) -> None:
    declared, executed = gpipe_order(2, 4), ORDER
    ranks, same = Ranks(declared, executed=executed), Ranks(executed)
    for each in (ranks, same):
        each.run(1, LAST_MONITOR_STEP)
    (message,) = warnings(caplog)
    assert "ran in another order than it declares; the plan is for what ran" in message
    assert message.endswith("1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    for controller in ranks.controllers:
        assert controller.order == executed
        assert list(controller.dag.actions) == [a for row in executed.ranks for a in row]
        assert plan_to_json(controller.plan) == plan_to_json(same.controllers[0].plan)


# -- figures ---------------------------------------------------------------------------------------


def test_collected_batches_have_the_length_of_the_pipelines_and_come_once() -> None:
    # With one rank there is no waiting, which the stub stages do not act out.
    order = parse_order(["0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"])
    ranks = Ranks(order)
    ranks.run(1, 6)
    actions = [action for row in order.ranks for action in row]
    whole, frozen = (sum(linear_ms(a, share) for a in actions) for share in (0.0, 1.0))
    (figures,) = ranks.collect()
    # Each phase lost its first pass.
    assert {phase: len(values) for phase, values in figures.batch_ms.items()} == {
        Phase.WARMUP: 5,
        Phase.UPPER_BOUND: 5,
        Phase.LOWER_BOUND: 5,
    }
    assert figures.batch_ms[Phase.WARMUP] == pytest.approx([whole] * 5)
    assert figures.batch_ms[Phase.LOWER_BOUND] == pytest.approx([frozen] * 5)
    ranks.run(7, 7)
    assert ranks.collect()[0].batch_ms.keys() == {Phase.RAMP}
    assert ranks.collect()[0].batch_ms == {}


# -- checkpoints -----------------------------------------------------------------------------------


def saved(ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint of all ranks holds, through text as a checkpoint would."""
    merged: dict[str, Any] = {}
    for controller in ranks.controllers:
        merged.update(controller.state_dict())
    return json.loads(json.dumps(merged))


@pytest.mark.parametrize("stopped_at", [1, 3, 5, 6, 8, 11])
@pytest.mark.parametrize("order", [ORDER, hand_order("v_shape")], ids=["1F1B", "v_shape"])
def test_a_resumed_run_freezes_as_one_that_never_stopped(
    order: ScheduleOrder, stopped_at: int
) -> None:
    whole, before, after = (Ranks(order) for _ in range(3))
    whole.run(1, 13)
    before.run(1, stopped_at)
    state = saved(before)
    for controller in after.controllers:
        controller.load_state_dict(state)
    assert saved(after) == state, "what was loaded can be saved again"
    after.run(stopped_at + 1, 13)
    for rank, stages in enumerate(whole.stages):
        for stage in stages:
            given = list(whole.masks(rank, stage))
            assert list(after.masks(rank, stage)) == given[3 * stopped_at :]
        plans = [each.controllers[rank].plan for each in (whole, after)]
        assert plan_to_json(plans[0]) == plan_to_json(plans[1])
        assert after.controllers[rank].order == whole.controllers[rank].order
    assert saved(after) == saved(whole)
    averages = [each.collect()[0].average_freeze_ratio for each in (whole, after)]
    assert averages[0] == averages[1]
    assert any(any(m) for given in whole.masks(1, order.n_stages // 2) for m in given.values())


def test_a_failure_is_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no bounds")

    monkeypatch.setattr(controller_module, "solve_from_times", failing)
    before, after = Ranks(ORDER), Ranks(ORDER)
    before.run(1, LAST_MONITOR_STEP)
    for controller in after.controllers:
        controller.load_state_dict(saved(before))
    caplog.clear()
    after.run(8, 8)
    assert "there is no plan (no bounds)" in warnings(caplog)[0]


def test_a_checkpoint_of_other_ranks_is_refused() -> None:
    state = saved(Ranks(ORDER))
    controller = Ranks(one_f_one_b_order(3, 4)).controllers[2]
    with pytest.raises(
        ValueError,
        match=r"the checkpoint's freezing state has \['rank_0', 'rank_1'\] but not rank_2; it was "
        r"saved with another number of ranks\. To measure anew, set "
        r'checkpoint\.exclude_from_loading = \["freezing"\]',
    ):
        controller.load_state_dict(state)


# -- settings --------------------------------------------------------------------------------------


def test_an_unknown_mode_of_the_first_stage_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"freezing\.first_stage is 'half'; known: all_or_nothing, keep_chain",
    ):
        FreezeSettings(phases=PHASES, first_stage="half")
