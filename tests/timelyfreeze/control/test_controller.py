import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.timelyfreeze.helpers.ranks import (
    PHASES,
    HandClock,
    Ranks,
    StubStage,
    linear_ms,
    warnings,
)
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.runtime import ObservedBatch
from timelyfreeze.runtime.linear import StageLinears
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    one_f_one_b_order,
    parse_action,
    parse_order,
)
from timelyfreeze.settings.phases import Phase

ORDER = one_f_one_b_order(2, 4)
LAST_MONITOR_STEP = PHASES.last_monitor_step


def all_frozen(masks: dict[int, list[bool]], n_microbatches: int = 4) -> bool:
    return set(masks) == set(range(n_microbatches)) and all(all(m) for m in masks.values())


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
    freezable = [a for a in controller.active_plan.dag.actions if a.kind.freezable]
    assert any(plan.ratio_of(action) > 0 for action in freezable)
    fractions = {7: 0.25, 8: 0.5, 9: 0.75, 10: 1.0, 11: 1.0, 500: 1.0}
    for step, fraction in fractions.items():
        controller.begin_step(step)
        assert controller.step.phase is (Phase.RAMP if step <= 10 else Phase.STABLE)
        for action in freezable:
            assert controller.active_plan.ratio(action, controller.step) == pytest.approx(
                fraction * plan.ratio_of(action)
            )
        means = {stage: fraction * r for stage, r in plan.stage_mean_ratios().items()}
        assert controller.expected_stage_ratios() == pytest.approx(means)


def test_input_gradients_are_left_out_where_the_stage_itself_is_frozen_whole_too() -> None:
    """The first stage behind a frozen front computes its own: the plan counts on its time."""
    order = one_f_one_b_order(3, 6)
    ranks = Ranks(order, max_freeze_ratio=[0.8, 0.4, 0.2])
    ranks.run(1, 12)
    plan = ranks.controllers[0].plan
    assert plan is not None
    left_out = [
        {
            m
            for m in range(order.n_microbatches)
            if all(
                plan.ratio_of(Action(front, ActionKind.FULL_BACKWARD, m)) == 1.0
                for front in range(stage + 1)
            )
        }
        for stage in range(order.n_stages)
    ]
    assert left_out[1] > left_out[2], "or there is nothing to tell apart"
    for rank in range(order.n_ranks):
        assert ranks.stages[rank][rank].without_input_grads[-1] == left_out[rank]


@pytest.mark.parametrize("first_stage", ["all_or_nothing", "per_tensor"])
def test_masks_follow_the_plan_on_average(first_stage: str) -> None:
    ranks = Ranks(ORDER, first_stage=first_stage, batches_per_step=40, max_freeze_ratio=0.6)
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
                assert all(abs(fraction - ratio) < 1 / 12 + 1e-9 for fraction in drawn)
                assert statistics.mean(drawn) == pytest.approx(ratio, abs=0.03)
    assert fractions > 0, "a plan of zeros and ones alone would test little"


@pytest.mark.slow
def test_tensors_of_a_compiled_block_are_frozen_all_or_none_at_the_planned_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))  # the other two tensors are alone
    monkeypatch.setattr(StubStage, "frozen_together", blocks)
    ranks = Ranks(ORDER, first_stage="per_tensor", batches_per_step=120, max_freeze_ratio=0.6)
    ranks.run(1, 12)
    drawn = [mask for masks in ranks.masks(1, 1) for mask in masks.values()]
    assert all(len({mask[i] for i in block}) == 1 for mask in drawn for block in blocks)
    assert any(mask[0] != mask[5] for mask in drawn)
    assert any(mask[10] != mask[11] for mask in drawn)
    metrics = ranks.collect()[0]
    wanted = ranks.controllers[0].expected_stage_ratios()
    assert 0.1 < max(wanted.values()) < 0.7
    assert metrics.applied_stage_ratios == pytest.approx(wanted, abs=0.05)


def test_planned_and_applied_ratios_meet_in_the_collected_metrics() -> None:
    ranks = Ranks(ORDER, first_stage="per_tensor", batches_per_step=50)
    ranks.run(1, 12)
    metrics = ranks.collect()
    assert metrics[0] == metrics[1]
    wanted = ranks.controllers[0].expected_stage_ratios()
    assert max(wanted.values()) > 0.1
    assert metrics[0].applied_stage_ratios == pytest.approx(wanted, abs=0.03)


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
    for metrics in ranks.collect():
        assert metrics.average_freeze_ratio == pytest.approx(statistics.mean(every))


def counted(ranks: Ranks, first_batch: int) -> dict[str, int]:
    """How often masks froze each tensor from a pass on, by what stages were given."""
    return {
        name: sum(
            mask[i]
            for given in list(ranks.masks(rank, rank))[first_batch:]
            for mask in given.values()
        )
        for rank in (0, 1)
        for i, name in enumerate(ranks.stages[rank][rank].parameter_names)
    }


def test_counts_of_frozen_tensors_are_those_of_the_masks_since_the_ramp() -> None:
    ranks = Ranks(ORDER, first_stage="per_tensor")
    ranks.run(1, 9)
    state = ranks.saved()
    later = Ranks(ORDER, first_stage="per_tensor")
    later.load(state)
    for each in (ranks, later):
        each.run(10, 13)
    wanted = counted(ranks, first_batch=3 * LAST_MONITOR_STEP)
    assert len(set(wanted.values())) > 2
    for each in (ranks, later):
        first, again = each.on_all(lambda rank, each=each: each.controllers[rank].frozen_counts())
        assert first == again
        assert {count.parameter: count.times_frozen for count in first} == wanted
        assert {count.backwards for count in first} == {7 * 3 * 4}
        assert [(c.rank, c.stage) for c in first] == [(0, 0)] * 12 + [(1, 1)] * 12


class StubEnergy:
    """Stage 0 has three times the gradient energy of stage 1, spread over its tensors."""

    is_complete = True

    def __init__(self, stage: int) -> None:
        self.energy = {stage: np.full(12, 3.0 if stage == 0 else 1.0)}
        self.scales: list[float] = []

    def measure(self, step: Any, scale: float) -> None:
        self.scales.append(scale)


@pytest.mark.parametrize(("last", "fraction"), [(2, 0.0), (8, 0.5), (13, 1.0)])
def test_p_eff_is_that_of_the_plan_and_not_of_the_draw(last: int, fraction: float) -> None:
    ranks = Ranks(ORDER, first_stage="per_tensor")
    energies = [StubEnergy(rank) for rank in (0, 1)]
    for controller, energy in zip(ranks.controllers, energies, strict=True):
        controller._updates._energy = energy  # type: ignore[assignment]
    ranks.run(1, last)
    metrics = ranks.on_all(lambda rank: ranks.controllers[rank].collect(gradient_scale=2.0))
    plan = ranks.controllers[0].plan
    planned = {0: 0.0, 1: 0.0} if plan is None else plan.stage_mean_ratios()
    wanted = 1.0 - fraction * (3.0 * planned[0] + planned[1]) / 4.0
    for each in metrics:
        assert each.energy is not None
        assert each.energy.p_eff == pytest.approx(wanted)
        assert each.energy.total == 48.0
    assert [energy.scales for energy in energies] == [[2.0], [2.0]]
    assert fraction == 0.0 or wanted < 0.95


def test_while_everything_is_frozen_no_energy_passes() -> None:
    ranks = Ranks(ORDER)
    for rank in (0, 1):
        ranks.controllers[rank]._updates._energy = StubEnergy(rank)  # type: ignore[assignment]
    ranks.run(1, 6)
    assert [metrics.energy.p_eff for metrics in ranks.collect() if metrics.energy] == [0.0, 0.0]


def test_every_step_since_the_last_collection_has_its_freeze_ratio() -> None:
    ranks = Ranks(ORDER, first_stage="per_tensor")
    ranks.run(1, 9)
    ranks.collect()
    ranks.run(10, 12)
    metrics, again = ranks.collect()
    assert metrics.step_ratios == again.step_ratios
    for step in (10, 11, 12):
        batches = slice(3 * (step - 1), 3 * step)
        fractions = [
            np.mean(masks.get(m, [False]))
            for rank in (0, 1)
            for masks in list(ranks.masks(rank, rank))[batches]
            for m in range(4)
        ]
        assert metrics.step_ratios[step] == pytest.approx(statistics.mean(fractions))
    assert sorted(metrics.step_ratios) == [10, 11, 12]


def test_replicas_and_reruns_draw_the_same_masks_and_seeds_differ() -> None:
    def given(**settings: Any) -> list[list[dict[int, list[bool]]]]:
        ranks = Ranks(ORDER, n_replicas=2, first_stage="per_tensor", **settings)
        ranks.run(1, 12)
        return [list(ranks.masks(rank, rank % 2)) for rank in range(4)]

    first, again, other = given(), given(), given(seed=43)
    assert first[:2] == first[2:]
    assert first == again
    assert first[1] != other[1]
    assert first[1][-1] != first[1][-2], "each pass draws again"


def test_whoever_looks_on_gets_every_pass_once_with_what_it_froze() -> None:
    ranks = Ranks(ORDER, first_stage="per_tensor")
    seen: list[list[ObservedBatch]] = [[], []]
    for controller, batches in zip(ranks.controllers, seen, strict=True):
        controller.log.on_batch = batches.append
    ranks.run(1, 12)
    ranks.collect()
    for rank, batches in enumerate(seen):
        assert [observed.step for observed in batches] == [s for s in range(1, 13) for _ in "123"]
        assert batches[12].phase is Phase.LOWER_BOUND
        assert [observed.is_cold for observed in batches[12:18]] == [True] + 5 * [False]
        for observed, masks in zip(batches, ranks.masks(rank, rank), strict=True):
            frozen = {m: float(np.mean(masks.get(m, [False]))) for m in range(4)}
            assert {a.microbatch: fraction for a, fraction in observed.fractions.items()} == frozen
            assert all(action.kind.freezable for action in observed.fractions)
            for action, (began_ms, ended_ms) in observed.record.intervals_ms.items():
                assert ended_ms - began_ms == pytest.approx(observed.record.durations_ms[action])


@pytest.mark.parametrize("is_tampered", [False, True])
def test_replicas_that_freeze_different_tensors_are_found_out(is_tampered: bool) -> None:
    ranks = Ranks(ORDER, n_replicas=2, first_stage="per_tensor")
    if is_tampered:  # rank 3 holds stage 1 of the second replica
        ranks.controllers[3].masked.settings = replace(ranks.settings, seed=1)
    ranks.run(1, 12)
    if not is_tampered:
        assert len(ranks.collect()) == 4
        return
    with pytest.raises(RuntimeError, match="ranks 1 and 3 hold stage 1"):
        ranks.collect()


def test_a_pass_that_fails_leaves_no_mask_and_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    disturbed, calm = Ranks(ORDER), Ranks(ORDER)
    for ranks in (disturbed, calm):
        ranks.run(1, 5)
    controller = disturbed.controllers[1]
    controller.begin_step(6)
    with pytest.raises(RuntimeError, match="1B2 failed"):
        disturbed.one_batch(1, fail_at=parse_action("1B2"))
    assert disturbed.stages[1][1].masks == {}
    for ranks in (disturbed, calm):
        ranks.run(6, LAST_MONITOR_STEP)
    plans = [ranks.controllers[0].plan for ranks in (disturbed, calm)]
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])


# -- failures --------------------------------------------------------------------------------------


def test_what_steps_do_beside_their_batches_is_in_the_plan_and_in_checkpoints() -> None:
    whole, stopped, resumed = (Ranks(ORDER) for _ in range(3))
    for ranks in (whole, stopped, resumed):
        ranks.outside_ms = [60.0, 45.0]  # the first rank waits for the second
    last = whole.settings.phases.last_upper_bound_step
    whole.run(1, whole.settings.phases.last_monitor_step)
    stopped.run(1, last)
    resumed.load(stopped.saved())
    # Where all is frozen, optimizers have less to do: that does not count.
    resumed.outside_ms = [3.0, 3.0]
    resumed.run(last + 1, whole.settings.phases.last_monitor_step)
    for ranks in (whole, resumed):
        for controller in ranks.controllers:
            assert controller.active_plan.bounds is not None
            assert controller.active_plan.bounds.outside_ms == 45.0 / ranks.batches_per_step


def test_the_reduction_of_gradients_is_beside_the_actions_of_a_batch() -> None:
    plain, replicated = Ranks(ORDER), Ranks(ORDER)
    replicated.reducing_ms = 20.0
    for ranks in (plain, replicated):
        ranks.outside_ms = [60.0, 45.0]
        ranks.run(1, ranks.settings.phases.last_monitor_step)
    before, now = (ranks.controllers[0].plan for ranks in (plain, replicated))
    assert before is not None
    assert now is not None
    assert now.outside_ms == before.outside_ms + 20.0
    assert now.batch_ms == before.batch_ms


def slow_subspaces(clock: HandClock) -> Subspaces:
    def end_batch(index: int) -> None:
        clock.now_ms += 7.0 if index == 0 else 0.0

    slow = Subspaces((), 0, (4,))
    slow.layers, slow.end_batch = (StageLinears(nn.Module()),), end_batch
    return slow


def test_what_subspaces_take_is_told_of_steps_that_freeze_nothing() -> None:
    ranks, told = Ranks(ORDER), {}
    for controller, clock in zip(ranks.controllers, ranks.clocks, strict=True):
        controller.turns.subspaces = slow_subspaces(clock)
    for step in range(1, 13):
        ranks.run(step, step)
        controller = ranks.controllers[0]
        told.setdefault(controller.step.phase, set()).add(controller.turns.turning_ms())
    assert told[Phase.WARMUP] == told[Phase.UPPER_BOUND] == {7.0}
    assert told[Phase.LOWER_BOUND] == told[Phase.STABLE] == {0.0}


def test_a_run_that_begins_after_monitoring_says_why_nothing_is_frozen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(ORDER)
    ranks.run(20, 20)
    assert set(warnings(caplog)) == {
        "Nothing is frozen: step 20 is past last_monitor_step (6) and there is no plan "
        "(the run did not pass through the monitoring steps)"
    }


# -- metrics ---------------------------------------------------------------------------------------


def test_collected_batches_have_the_length_of_the_pipelines_and_come_once() -> None:
    # With one rank there is no waiting, which the stub stages do not act out.
    order = parse_order(["0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"])
    ranks = Ranks(order)
    ranks.run(1, 6)
    actions = [action for row in order.ranks for action in row]
    whole, frozen = (sum(linear_ms(a, fraction) for a in actions) for fraction in (0.0, 1.0))
    (metrics,) = ranks.collect()
    # Each phase lost its first pass.
    assert {phase: len(values) for phase, values in metrics.batch_ms.items()} == {
        Phase.WARMUP: 5,
        Phase.UPPER_BOUND: 5,
        Phase.LOWER_BOUND: 5,
    }
    assert metrics.batch_ms[Phase.WARMUP] == pytest.approx([whole] * 5)
    assert metrics.batch_ms[Phase.LOWER_BOUND] == pytest.approx([frozen] * 5)
    ranks.run(7, 7)
    assert ranks.collect()[0].batch_ms.keys() == {Phase.RAMP}
    assert ranks.collect()[0].batch_ms == {}
