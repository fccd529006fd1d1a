"""Controllers that have a policy, alone and under a plan, on pretended ranks in threads."""

import json
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import timelyfreeze.control.plans.planner as planner_module
from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.timelyfreeze.helpers.ranks import (
    N_TENSORS,
    PHASES,
    Ranks,
    linear_ms,
    warnings,
)
from tests.timelyfreeze.helpers.stub_policy import StubMeter, StubPolicy, choose_by_number
from timelyfreeze.control.parts import FrontAhead
from timelyfreeze.policies.policy import Check
from timelyfreeze.runtime import BatchEntry, BlockPlace, ObservedBatch, StepPart
from timelyfreeze.schedule.order import Action, ActionKind, ScheduleOrder, one_f_one_b_order
from timelyfreeze.settings.phases import Phase, PhaseSchedule

ORDER = one_f_one_b_order(2, 4)
LAST_MONITOR_STEP = PHASES.last_monitor_step
UNPLANNED = PhaseSchedule.unplanned(2)
ORDERS = {"1F1B": ORDER, **{name: hand_order(name) for name in ("zero_bubble", "v_shape")}}
# Frozen tensors at the start and after each check; the stub stages have 12 each.
FRONTS = (5, 12, 15, 1000)


def fronts(n_stages: int) -> Callable[[Check], np.ndarray]:
    tensors = np.arange(n_stages * N_TENSORS)
    return choose_by_number(*(tensors < n_frozen for n_frozen in FRONTS))


def n_frozen_at(step: int) -> int:
    """Warm-up is steps 1 and 2; checks are at the ends of steps 4, 6 and 8."""
    return 0 if step <= 2 else FRONTS[min((step - 3) // 2, 3)]


def alone(order: ScheduleOrder = ORDER, **options: Any) -> Ranks:
    policy = StubPolicy(fronts(order.n_stages))
    return Ranks(order, policy=policy, phases=UNPLANNED, **options)


def scattered(seed: int = 0, fraction: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).random(2 * N_TENSORS) < fraction


def planned(frozen: np.ndarray, **options: Any) -> Ranks:
    settings = {"first_stage": "per_tensor", **options}
    return Ranks(ORDER, policy=StubPolicy(lambda check: frozen), **settings)


# -- a policy alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_its_choice_is_frozen_in_every_microbatch_after_warm_up(name: str) -> None:
    order = ORDERS[name]
    ranks = alone(order)
    ranks.run(1, 10)
    for stage, rank in enumerate(order.stage_to_rank):
        given = list(ranks.masks(rank, stage))
        assert len(given) == 3 * 10
        for i, masks in enumerate(given):
            n_frozen = n_frozen_at(1 + i // 3) - stage * N_TENSORS
            mask = [tensor < n_frozen for tensor in range(N_TENSORS)]
            every = dict.fromkeys(range(order.n_microbatches), mask)
            assert masks == (every if any(mask) else {})
        assert ranks.stages[rank][stage].masks == {}, "no mask may outlive its pass"


@pytest.mark.parametrize("name", ORDERS)
def test_input_gradients_are_needed_where_a_live_stage_lies_in_front(name: str) -> None:
    order = ORDERS[name]
    ranks = alone(order)
    ranks.run(1, 10)
    for stage, rank in enumerate(order.stage_to_rank):
        given = ranks.stages[rank][stage].without_input_grads
        # In warm-up everything is as without freezing; then the first stage never needs any.
        needed = [step <= 2 or n_frozen_at(step) < stage * N_TENSORS for step in range(1, 11)]
        every = frozenset(range(order.n_microbatches))
        assert given == [frozenset() if needs else every for needs in needed for _ in range(3)]


def test_a_live_tensor_in_front_keeps_the_chain_whatever_is_frozen_behind() -> None:
    frozen = np.ones(24, dtype=np.bool_)
    frozen[7] = False
    ranks = Ranks(ORDER, policy=StubPolicy(lambda check: frozen), phases=UNPLANNED)
    ranks.run(1, 3)
    assert ranks.stages[1][1].without_input_grads == [frozenset()] * 9
    assert all(all(mask) for mask in list(ranks.masks(1, 1))[-1].values())


def test_nothing_is_measured_planned_or_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    ranks = alone()
    ranks.run(1, 7)  # before everything is frozen
    assert warnings(caplog) == []
    assert ranks.solved == [[], []]
    assert [exchange.n_gathers for exchange in ranks.exchanges] == [0, 0]
    for controller in ranks.controllers:
        assert not controller.phases.measures
        assert (controller.plan, controller.active_plan.bounds, controller.planner.failure) == (
            None,
            None,
            None,
        )
        assert not controller.planner.lacks_plan(controller.step)
        assert controller.expected_batch_ms() is None
        assert controller.active_plan.order == ORDER
        assert list(controller.active_plan.dag.actions) == [a for row in ORDER.ranks for a in row]
    assert "planner" not in json.loads(ranks.saved()["rank_0"])


def test_without_warm_up_the_first_step_freezes() -> None:
    policy = StubPolicy(lambda check: np.arange(24) < 12)
    ranks = Ranks(ORDER, policy=policy, phases=PhaseSchedule.unplanned(0))
    ranks.run(1, 1)
    assert next(ranks.masks(0, 0)) == dict.fromkeys(range(4), [True] * 12)
    assert ranks.stages[1][1].without_input_grads == [frozenset(range(4))] * 3


def test_expected_ratios_are_the_shares_of_what_was_chosen() -> None:
    ranks = alone()
    controller = ranks.controllers[1]
    for step in range(1, 11):
        controller.begin_step(step)
        n_frozen = n_frozen_at(step)
        wanted = {0: min(n_frozen, 12) / 12, 1: min(max(n_frozen - 12, 0), 12) / 12}
        assert controller.expected_stage_ratios() == pytest.approx(wanted)
        ranks.run(step, step)


def test_collected_metrics_are_those_of_masks_policy_and_meter() -> None:
    ranks = alone()
    ranks.run(1, 6)
    metrics, other = ranks.collect()
    assert metrics == other
    every = [
        np.mean(masks.get(microbatch, [False]))
        for rank in (0, 1)
        for masks in ranks.masks(rank, rank)
        for microbatch in range(4)
    ]
    assert metrics.average_freeze_ratio == pytest.approx(statistics.mean(every))
    assert metrics.applied_stage_ratios == pytest.approx({0: 1.0, 1: 0.0})
    assert metrics.batch_ms.keys() == {Phase.WARMUP, Phase.STABLE}
    assert metrics.policy == {"frozen_tensors": 15}
    assert metrics.score_bytes == StubMeter.n_bytes
    assert metrics.score_ms_per_step == 0.0, "the hand clock stands still while scoring"


def test_a_batch_tells_where_it_began_and_what_the_policy_had_decided() -> None:
    """Of each step's three batches the second begins at stage 1."""
    ranks = alone()
    entries = {1: BatchEntry(BlockPlace(1, 0)), 2: BatchEntry()}
    entered: list[BatchEntry] = []
    for stages, controller in zip(ranks.stages, ranks.controllers, strict=True):
        front = StepPart()
        front.entry = entries.get  # type: ignore[method-assign, assignment]
        controller.parts.insert(-1, front)
        for stage in stages.values():
            stage.enter = entered.append  # type: ignore[attr-defined]
    seen: list[ObservedBatch] = []
    ranks.controllers[1].log.on_batch = seen.append
    ranks.run(1, 7)
    ranks.collect()
    assert [observed.entry_stage for observed in seen] == 7 * [None, 1, None]
    frozen = [observed.policy["frozen_tensors"] for observed in seen[::3]]
    assert frozen == [5, 5, 5, 5, 12, 12, 15], "that of the check before the step"
    assert len(entered) == 2 * 7 * 2


def test_a_front_that_works_ahead_is_told_how_many_stages_are_frozen_whole() -> None:
    """Warm-up ends after step 2; the stub freezes stage 0 whole from the fourth check on."""
    ranks = alone()
    told: list[int] = []
    entries = BatchEntry(BlockPlace(1, 0))
    for stages, controller in zip(ranks.stages, ranks.controllers, strict=True):
        ahead: Any = SimpleNamespace(begin_step=told.append, entry=lambda number: entries)
        controller.parts.insert(-1, FrontAhead(ahead, controller.checks))
        for stage in stages.values():
            stage.enter = lambda entry: None  # type: ignore[attr-defined]
    seen: list[ObservedBatch] = []
    ranks.controllers[1].log.on_batch = seen.append
    expected = []
    for step in range(1, 8):
        first_live = ranks.checks[0].first_live_stage
        ranks.run(step, step)
        expected.append(0 if ranks.controllers[0].step.phase is Phase.WARMUP else first_live)
    assert told[::2] == told[1::2] == expected
    assert set(expected) == {0, 1}
    ranks.collect()
    assert {observed.entry_stage for observed in seen} == {1}


@pytest.mark.parametrize(
    ("phases", "applied"),
    # Planned: monitoring up to step 6, the ramp up to 10, and a step under the plan.
    [(UNPLANNED, [0, 5, 5, 12, 12, 15]), (PHASES, [0] * 10 + [5, 5])],
)
def test_a_pipeline_is_made_for_what_is_applied(phases: PhaseSchedule, applied: list[int]) -> None:
    """Not for what was decided before the first step, which warm-up does not freeze."""
    policy = StubPolicy(fronts(2) if phases is UNPLANNED else lambda check: np.arange(24) < 5)
    ranks = Ranks(ORDER, policy=policy, phases=phases)
    settled = []
    for step in range(1, len(applied) + 1):
        ranks.run(step, step)
        (front,) = {controller.checks.settled_front for controller in ranks.controllers}
        settled.append(front)
    assert settled == applied
    stopped, resumed = (Ranks(ORDER, policy=policy, phases=phases) for _ in range(2))
    stopped.run(1, 1)
    resumed.load(stopped.saved())
    assert {controller.checks.settled_front for controller in resumed.controllers} == {0}


def test_the_slowest_scoring_counts() -> None:
    ranks = alone()
    ranks.run(1, 2)
    for rank, cost_ms in enumerate((3.0, 8.0)):
        ranks.checks[rank].meter.add_step = lambda frequency, rank=rank, ms=cost_ms: move(rank, ms)

    def move(rank: int, ms: float) -> None:
        ranks.clocks[rank].now_ms += ms

    assert [each.score_ms_per_step for each in ranks.collect()] == [0.0, 0.0]
    ranks.run(3, 3)
    assert [each.score_ms_per_step for each in ranks.collect()] == pytest.approx([8.0, 8.0])


# -- a policy under a plan -------------------------------------------------------------------------


def test_monitoring_is_that_of_a_plan_alone() -> None:
    ranks, plain = planned(scattered()), Ranks(ORDER, first_stage="per_tensor")
    for each in (ranks, plain):
        each.run(1, LAST_MONITOR_STEP)
    for rank in (0, 1):
        given = list(ranks.masks(rank, rank))
        assert given == list(plain.masks(rank, rank))
        assert given[: 3 * 4] == [{}] * 12
        everything = dict.fromkeys(range(4), [True] * N_TENSORS)
        assert given[3 * 4 :] == [everything] * 6
        controller = ranks.controllers[rank]
        assert controller.phases.measures
        for i, action in enumerate(controller.active_plan.dag.actions):
            assert controller.active_plan.bounds.max_ms[i] == pytest.approx(linear_ms(action, 0.0))
            assert controller.active_plan.bounds.min_ms[i] == pytest.approx(linear_ms(action, 1.0))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_the_choice_is_brought_to_the_planned_ratio(fraction: float) -> None:
    frozen = scattered(fraction=fraction)
    ranks = planned(frozen, batches_per_step=20, max_freeze_ratio=0.6)
    ranks.run(1, 13)
    plan = ranks.controllers[0].plan
    assert plan is not None
    ramp = {7: 0.25, 8: 0.5, 9: 0.75, 10: 1.0, 11: 1.0, 12: 1.0, 13: 1.0}
    n_less = n_more = 0
    for rank in (0, 1):
        chosen = frozen[rank * N_TENSORS : (rank + 1) * N_TENSORS]
        given = list(ranks.masks(rank, rank))
        for step, part in ramp.items():
            for masks in given[20 * (step - 1) : 20 * step]:
                for microbatch in range(4):
                    mask = np.array(masks.get(microbatch, [False] * N_TENSORS))
                    action = Action(rank, ActionKind.FULL_BACKWARD, microbatch)
                    ratio = part * plan.ratio_of(action)
                    # Tensors are equal in size, so a draw misses by less than one of them.
                    assert abs(mask.mean() - ratio) < 1 / N_TENSORS + 1e-9
                    if ratio < chosen.mean():
                        assert not (mask & ~chosen).any()
                        n_less += mask.sum() > 0
                    else:
                        assert not (chosen & ~mask).any()
                        n_more += mask.sum() > chosen.sum()
    assert n_more > 0 or fraction == 1.0
    assert n_less > 0 or fraction == 0.0


def test_draws_differ_from_pass_to_pass_and_agree_between_replicas_and_reruns() -> None:
    def given(**options: Any) -> list[list[dict[int, list[bool]]]]:
        ranks = planned(scattered(), n_replicas=2, **options)
        ranks.run(1, 12)
        return [list(ranks.masks(rank, rank % 2)) for rank in range(4)]

    first, again, other = given(), given(), given(seed=43)
    assert first[:2] == first[2:]
    assert first == again
    assert first[1] != other[1]
    assert first[1][-1] != first[1][-2]


def test_where_the_chain_is_kept_every_stage_hands_on_its_gradient() -> None:
    """Whatever the policy freezes: the plan's times are those of backwards that do."""
    ranks = planned(np.ones(24, dtype=np.bool_))
    ranks.run(1, 12)
    for rank in (0, 1):
        assert ranks.stages[rank][rank].without_input_grads == [frozenset()] * 36


def test_expected_ratios_are_the_plans() -> None:
    ranks, plain = planned(scattered()), Ranks(ORDER, first_stage="per_tensor")
    for each in (ranks, plain):
        each.run(1, 8)
    for a, b in zip(ranks.controllers, plain.controllers, strict=True):
        assert a.expected_stage_ratios() == b.expected_stage_ratios()
        assert a.expected_batch_ms() == b.expected_batch_ms()
    assert max(ranks.controllers[0].expected_stage_ratios().values()) > 0.0


def test_without_a_plan_the_policy_freezes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("every action lasts 0 ms")

    monkeypatch.setattr(planner_module, "solve_from_times", failing)
    ranks = planned(scattered())
    ranks.run(1, 12)
    assert warnings(caplog) == [
        "Nothing is frozen: step 7 is past last_monitor_step (6) and there is no plan "
        "(every action lasts 0 ms)"
    ]
    for rank in (0, 1):
        assert list(ranks.masks(rank, rank))[3 * LAST_MONITOR_STEP :] == [{}] * 18


def test_steps_of_the_lower_bound_do_not_count_for_checks() -> None:
    ranks = planned(scattered())
    numbers = []
    for step in range(1, 11):
        ranks.run(step, step)
        numbers.append([checks.decision.memory["numbers"][-1] for checks in ranks.checks])
    # Of steps 3, 4, 7, 8, 9, 10 every second one ends with a check.
    assert numbers == [[n, n] for n in (0, 0, 0, 1, 1, 1, 1, 2, 2, 3)]
