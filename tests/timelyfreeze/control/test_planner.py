"""What is solved, from which times, and what becomes of a run without a plan."""

import logging
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest

import timelyfreeze.control.plans.planner as planner_module
from tests.timelyfreeze.helpers.pipelines import simulate
from tests.timelyfreeze.helpers.ranks import PHASES, Ranks, linear_ms, warnings
from timelyfreeze.control.plans.measurements import Measured
from timelyfreeze.planning.lp import LpError
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.schedule.order import Action, gpipe_order, one_f_one_b_order, parse_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing import Energies

ORDER = one_f_one_b_order(2, 4)
LAST_MONITOR_STEP = PHASES.last_monitor_step


# -- solving ---------------------------------------------------------------------------------------


def test_a_solver_need_not_import_torch_to_read_what_was_measured() -> None:
    """Its process would take seconds for that, and a tenth of one for the rest."""
    measured = Measured()
    measured.energies = Energies(whole=1.0)
    program = "import pickle, sys; pickle.load(sys.stdin.buffer); print('torch' in sys.modules)"
    question, command = pickle.dumps(measured.rank_times()), [sys.executable, "-c", program]
    answer = subprocess.run(command, input=question, capture_output=True, check=True)
    assert answer.stdout == b"False\n"


def test_the_plan_is_solved_once_on_rank_0_and_handed_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(ORDER, n_replicas=2)
    solved_at: list[list[int]] = []
    solve = planner_module.solve_from_times

    def counting(*args: Any, **kwargs: Any) -> Any:
        solved_at.append([controller.step.number for controller in ranks.controllers])
        return solve(*args, **kwargs)

    monkeypatch.setattr(planner_module, "solve_from_times", counting)
    ranks.run(1, LAST_MONITOR_STEP - 1)
    assert [c.plan for c in ranks.controllers] == [None] * 4
    ranks.run(LAST_MONITOR_STEP, 14)
    assert solved_at == [[LAST_MONITOR_STEP] * 4]
    assert [exchange.n_gathers for exchange in ranks.exchanges] == [1] * 4
    plans = [controller.plan for controller in ranks.controllers]
    assert len({plan_to_json(plan) for plan in plans if plan is not None}) == 1
    for controller, calls in zip(ranks.controllers, ranks.solved, strict=True):
        assert calls == [(controller.plan, controller.active_plan.bounds)]
        assert not controller.planner.lacks_plan(controller.step)


def test_bounds_are_what_the_actions_took_in_the_two_halves() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, LAST_MONITOR_STEP)
    for controller in ranks.controllers:
        for i, action in enumerate(controller.active_plan.dag.actions):
            assert controller.active_plan.bounds.max_ms[i] == pytest.approx(linear_ms(action, 0.0))
            assert controller.active_plan.bounds.min_ms[i] == pytest.approx(linear_ms(action, 1.0))


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
    """Had the slow first batches counted, the bounds would be far too long."""
    order = gpipe_order(2, 2)
    ranks = Ranks(order, batches_per_step=1, discard_batches=1)
    slow = {"now": False}

    def duration_ms(action: Action, fraction: float) -> float:
        return linear_ms(action, fraction) + (1000.0 if slow["now"] else 0.0)

    ranks.duration_ms = duration_ms
    for step in range(1, LAST_MONITOR_STEP + 1):
        slow["now"] = step in (3, 5)  # the first of each half
        ranks.run(step, step)
    assert max(ranks.controllers[0].active_plan.bounds.max_ms) < 10.0


def test_predictions_belong_to_the_current_step() -> None:
    ranks = Ranks(ORDER, skip_input_grads="off")
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


def test_processors_that_ranks_fraction_reach_plan_and_prediction() -> None:
    alone, shared = Ranks(ORDER), Ranks(ORDER, n_processors=1.0)
    for ranks in (alone, shared):
        ranks.run(1, LAST_MONITOR_STEP)
    work = sum(linear_ms(action, 1.0) for action in alone.controllers[0].active_plan.dag.actions)
    assert shared.controllers[0].expected_batch_ms() == pytest.approx(work)
    assert alone.controllers[0].expected_batch_ms() < work


@pytest.mark.parametrize(
    ("n_processors", "ranks"),
    [(None, "a device or core of its own for each rank"), (1.0, "2 ranks that share 1 core")],
)
def test_the_plan_is_logged_with_its_interval_and_for_what_it_holds(
    n_processors: float | None, ranks: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Ranks(ORDER, n_processors=n_processors).run(1, LAST_MONITOR_STEP)
    (said, *_) = [m for m in caplog.messages if m.startswith("Freeze plan: batch")]
    assert re.search(r"; 9 of 10 batches within -[\d.]+% to \+[\d.]+% if the machine", said)
    assert said.endswith(f", for {ranks}")


@pytest.mark.parametrize("cap", [0.5, 0.9, 1.0])
def test_the_plan_is_logged_with_what_it_freezes_for_good(
    cap: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks = Ranks(ORDER, max_freeze_ratio=cap)
    ranks.run(1, LAST_MONITOR_STEP)
    plan = ranks.controllers[0].plan
    assert plan is not None
    (said, *_) = [m for m in caplog.messages if m.startswith("Freeze plan: batch")]
    whole = [
        str(stage)
        for stage in range(ORDER.n_stages)
        if all(plan.ratio_of(a) == 1.0 for row in ORDER.ranks for a in row
               if a.stage == stage and a.kind.freezable)
    ]  # fmt: skip
    assert bool(whole) is (cap == 1.0)
    told = re.search(r"frozen for good under it: stage ([\d, ]+);", said)
    assert (told[1].split(", ") if told else []) == whole


def test_backwards_that_freezing_does_not_shorten_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def duration_ms(action: Action, fraction: float) -> float:
        return linear_ms(action, 0.0 if action.stage == 0 else fraction)

    ranks = Ranks(ORDER, duration_ms=duration_ms)
    ranks.run(1, LAST_MONITOR_STEP)
    (message, *_) = warnings(caplog)
    assert "Freezing makes 4 of 8 backward actions no faster, as measured (0B0, 0B1" in message
    assert ranks.controllers[1].plan.stage_mean_ratios()[0] == 0.0


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
        assert controller.active_plan.order == executed
        assert list(controller.active_plan.dag.actions) == [
            a for row in executed.ranks for a in row
        ]
        assert plan_to_json(controller.plan) == plan_to_json(same.controllers[0].plan)


# -- failures --------------------------------------------------------------------------------------


def assert_trains_on_unfrozen(ranks: Ranks, first_batch: int) -> None:
    for rank, stages in enumerate(ranks.stages):
        controller = ranks.controllers[rank]
        assert controller.plan is None
        assert controller.planner.lacks_plan(controller.step)
        assert set(controller.expected_stage_ratios().values()) == {0.0}
        for stage in stages:
            assert list(ranks.masks(rank, stage))[first_batch:] == [{}] * (12 * 3 - first_batch)


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

    monkeypatch.setattr(planner_module, "solve_from_times", failing)
    ranks = Ranks(ORDER)
    ranks.run(1, 10)  # all of the ramp
    messages = warnings(caplog)
    assert len(messages) == 1, "one warning, from rank 0"
    assert set(messages) == {
        f"Nothing is frozen: step 7 is past last_monitor_step (6) and there is no plan ({error})"
    }
    ranks.run(11, 12)
    assert [controller.planner.failure for controller in ranks.controllers] == [str(error)] * 2
    assert ranks.solved == [[], []]
    assert_trains_on_unfrozen(ranks, 3 * LAST_MONITOR_STEP)
    assert ranks.collect()[0].batch_ms.keys() >= {Phase.RAMP}


def test_an_unforeseen_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(planner_module, "solve_from_times", failing)
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
        assert "action 0F0 has no unfrozen sample" in controller.planner.failure
    assert "and there is no plan (action 0F0 has no unfrozen sample" in warnings(caplog)[0]


def test_a_failure_is_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no bounds")

    monkeypatch.setattr(planner_module, "solve_from_times", failing)
    before, after = Ranks(ORDER), Ranks(ORDER)
    before.run(1, LAST_MONITOR_STEP)
    after.load(before.saved())
    caplog.clear()
    after.run(8, 8)
    assert "there is no plan (no bounds)" in warnings(caplog)[0]


def test_a_plan_of_other_actions_is_refused() -> None:
    """The same stages and microbatches, but backwards in two halves."""
    before = Ranks(ORDER)
    before.run(1, LAST_MONITOR_STEP)
    rows = [" ".join(map(str, row)) for row in ORDER.ranks]
    halves = [re.sub(r"(\d)B(\d)", r"\1I\2 \1W\2", row) for row in rows]
    after = Ranks(parse_order(halves))
    with pytest.raises(
        ValueError,
        match=r"the checkpoint's freeze plan was made for another pipeline: 16 actions, of which "
        r"this run has 8; resume with the same stages on each rank and batch sizes, or, "
        "to measure again, load the checkpoint without it",
    ):
        after.load(before.saved())


def test_a_plan_of_other_microbatches_is_refused() -> None:
    before = Ranks(ORDER)
    before.run(1, LAST_MONITOR_STEP)
    after = Ranks(one_f_one_b_order(2, 2))
    with pytest.raises(ValueError, match=r"are those of 4 microbatches in a batch, this run has 2"):
        after.load(before.saved())
