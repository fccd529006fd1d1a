"""Grids against closed forms, simulations and an exhaustive search."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds, simulate
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
    order_to_csv,
)
from timelyfreeze.settings.freezing import PER_TENSOR
from timelyfreeze.timing.bounds import DurationBounds, bounds_to_json
from timelyfreeze.whatif.answers import answer
from timelyfreeze.whatif.bounds_file import (
    BoundsFile,
    PipelineMetadata,
    bounds_file_text,
    read_bounds_file,
    recall,
)
from timelyfreeze.whatif.grid import BEST_SPLIT, DEFAULT_SPLIT, Case, Grid
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

N_RANKS = 4
EVEN = StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
LAYER = EVEN.over(2)


def saved(folder: Path, order: ScheduleOrder, bounds: DurationBounds, **notes: Any) -> BoundsFile:
    """A bounds file of these bounds, read back."""
    path = folder / "bounds.json"
    path.write_text(bounds_file_text(build_dag(order), bounds, PipelineMetadata(**notes)))
    (folder / "schedule.csv").write_text(order_to_csv(order))
    return read_bounds_file(path)


@pytest.fixture
def even(tmp_path: Path) -> BoundsFile:
    """Four stages of 2 layers, all alike, the first one too."""
    order = one_f_one_b_order(N_RANKS, 8)
    bounds = bounds_from_times(build_dag(order), [EVEN] * N_RANKS)
    return saved(tmp_path, order, bounds, layers=(2, 2, 2, 2), tokens_per_microbatch=100)


def grid(**changes: Any) -> Grid:
    return replace(
        Grid(
            schedules=("1F1B",),
            caps=(0.5,),
            microbatches=(8,),
            splits=(DEFAULT_SPLIT,),
            n_ranks=N_RANKS,
            first_stage=PER_TENSOR,
        ),
        **changes,
    )


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("n_microbatches", [4, 8, 16])
def test_even_stages_follow_the_closed_form(
    even: BoundsFile, schedule: str, n_microbatches: int
) -> None:
    (case,) = answer(
        even, grid(schedules=(schedule,), microbatches=(n_microbatches,), caps=(1.0,))
    ).cases
    # Each rank works M (F + B) and waits (S - 1) (F + B), whether B takes 4 or 2 ms.
    slots = n_microbatches + N_RANKS - 1
    assert case.step_ms == pytest.approx(slots * 6.0)
    assert case.all_frozen_step_ms == pytest.approx(slots * 4.0)
    assert case.frozen_step_ms == pytest.approx(slots * 4.0)
    assert case.gain == pytest.approx(0.5)
    assert case.upper_bound_gain == pytest.approx(0.5)
    assert case.kappa == pytest.approx(1 / (1 + case.gain))
    # Eq. 50: everything frozen takes 1 / 1.5 of the step.
    cap = case.max_freeze_ratio
    assert isinstance(cap, float)
    assert case.kappa_of_cap == pytest.approx(1 - cap + cap / 1.5)
    assert case.bubble == pytest.approx((N_RANKS - 1) / slots)
    assert case.tokens_per_second == pytest.approx(1e3 * 100 * n_microbatches / (slots * 4.0) / 4)
    assert case.tokens_per_second_unfrozen == pytest.approx(
        1e3 * 100 * n_microbatches / (slots * 6.0) / 4
    )
    assert case.layers == (2, 2, 2, 2)


def test_nothing_is_frozen_under_a_cap_of_zero(even: BoundsFile) -> None:
    (case,) = answer(even, grid(caps=(0.0,))).cases
    assert case.frozen_step_ms == case.step_ms
    assert case.stage_ratios == (0.0,) * 4
    assert case.mean_ratio == 0.0
    assert case.frozen_bubble == case.bubble


def test_the_chosen_cap_keeps_three_quarters_of_what_the_best_one_gains(even: BoundsFile) -> None:
    auto, *others = answer(even, grid(caps=("auto", 0.1, 0.2, 0.3, 0.4, 0.8))).cases
    times = []
    for case in others:
        ratios = np.array(case.stage_ratios)
        steps = math.sqrt(1.0 + (ratios / (1.0 - ratios)).mean())
        assert case.time_to_loss == pytest.approx(case.frozen_step_ms / case.step_ms * steps)
        times.append(case.time_to_loss)
    assert auto.max_freeze_ratio == "auto"
    assert auto.time_to_loss is not None
    assert 1.0 - auto.time_to_loss >= 0.75 * (1.0 - min(times)) - 1e-9
    assert times[-1] > 1.0  # a cap of 0.8 does not pay


def fastest_by_search(
    order: ScheduleOrder, stages: list[StageTimes], cap: float, levels: list[float]
) -> float:
    """The shortest batch over every choice of ratios out of ``levels`` within the cap."""
    backwards = [a for row in order.ranks for a in row if a.kind.freezable]
    best = math.inf
    for ratios in itertools.product(levels, repeat=len(backwards)):
        chosen = dict(zip(backwards, ratios, strict=True))
        by_stage = [[r for a, r in chosen.items() if a.stage == s] for s in range(order.n_stages)]
        if any(sum(own) > cap * len(own) + 1e-9 for own in by_stage):
            continue

        def duration_ms(action: Action, chosen: dict[Action, float] = chosen) -> float:
            low, high = stages[action.stage].bounds_of(action.kind)
            return high - chosen.get(action, 0.0) * (high - low)

        best = min(best, max(end for _, end in simulate(order, duration_ms).values()))
    return best


@pytest.mark.parametrize(
    ("schedule", "make"), [("GPipe", gpipe_order), ("1F1B", one_f_one_b_order)]
)
@pytest.mark.parametrize("cap", [0.0, 0.5, 1.0])
def test_a_small_grid_is_what_a_search_finds(
    tmp_path: Path, schedule: str, make: Any, cap: float
) -> None:
    stages = [StageTimes(2.0, 4.0, 2.0, 0.0, 4.0, 2.0), StageTimes(3.0, 4.0, 2.0, 2.0, 2.0, 0.0)]
    measured = gpipe_order(2, 3)
    file = saved(tmp_path, measured, bounds_from_times(build_dag(measured), stages))
    (case,) = answer(
        file, grid(schedules=(schedule,), microbatches=(2,), caps=(cap,), n_ranks=2)
    ).cases
    order = make(2, 2)
    found = fastest_by_search(order, stages, cap, [0.0, 0.25, 0.5, 0.75, 1.0])
    assert case.frozen_step_ms == pytest.approx(found)
    assert case.step_ms == pytest.approx(fastest_by_search(order, stages, 0.0, [0.0]))
    assert case.all_frozen_step_ms == pytest.approx(fastest_by_search(order, stages, 1.0, [1.0]))
    assert all(ratio <= cap + 1e-9 for ratio in case.stage_ratios)


def test_a_first_stage_that_is_frozen_whole_has_no_fractions(even: BoundsFile) -> None:
    for case in answer(even, grid(first_stage="all_or_nothing", caps=(0.3, 0.5, 0.7))).cases:
        assert (case.stage_ratios[0] * 8) == pytest.approx(round(case.stage_ratios[0] * 8))


@pytest.mark.parametrize("skip_input_grads", ["off", "use"])
def test_backwards_that_nobody_needs(tmp_path: Path, skip_input_grads: str) -> None:
    order = one_f_one_b_order(3, 3)
    times = [StageTimes(2.0, 4.0, 0.0, 0.0, 4.0, 0.0), *[EVEN] * 2]
    file = saved(tmp_path, order, bounds_from_times(build_dag(order), times))
    first = {"first_stage": "all_or_nothing", "n_ranks": 3, "microbatches": (3,), "caps": (1.0,)}
    (case,) = answer(file, grid(skip_input_grads=skip_input_grads, **first)).cases

    def frozen_ms(action: Action) -> float:
        if skip_input_grads != "off" and action.kind is not ActionKind.FORWARD:
            return 0.0  # all stages in front are frozen whole
        return times[action.stage].bounds_of(action.kind)[0]

    all_frozen_ms = max(end for _, end in simulate(order, frozen_ms).values())
    assert case.all_frozen_step_ms == pytest.approx(all_frozen_ms)
    # A chain that is kept needs every gradient.
    kept = {**first, "first_stage": "per_tensor"}
    cases = [
        answer(file, grid(skip_input_grads=word, **kept)).cases[0]
        for word in ("off", skip_input_grads)
    ]
    assert cases[0] == cases[1]


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"])
def test_schedules_of_torch_with_more_stages(even: BoundsFile, schedule: str) -> None:
    from timelyfreeze.runtime.torch_pipelining import named_order

    (case,) = answer(even, grid(schedules=(schedule,))).cases
    # TorchTitan cuts 8 layers and two ends into 8 stages as 1 2 1 1 1 1 1 0.
    assert case.layers == (1, 2, 1, 1, 1, 1, 1, 0)
    order = named_order(schedule, N_RANKS, 8, stages_per_rank=2)
    layers = case.layers

    def duration_ms(action: Action) -> float:
        return LAYER.bounds_of(action.kind)[1] * layers[action.stage]

    def in_front(action: Action) -> float:
        """A first stage has no input gradient, so its W is its whole backward."""
        if action.stage or action.kind.value not in "IW":
            return duration_ms(action)
        return 0.0 if action.kind.value == "I" else LAYER.backward_ms * layers[0]

    ends = simulate(order, in_front)
    assert case.step_ms == pytest.approx(max(end for _, end in ends.values()))
    work_ms = sum(end - start for start, end in ends.values())
    assert case.bubble == pytest.approx(1.0 - work_ms / (N_RANKS * case.step_ms))


def test_the_best_unfrozen_is_the_even_split(tmp_path: Path) -> None:
    # 6 layers of 1 + 2 ms each, cut badly.
    stages = [
        StageTimes(1.0, 2.0, 1.0, 0.0, 2.0, 1.0),
        StageTimes(1.0, 2.0, 1.0, 1.0, 1.0, 0.0),
        StageTimes(4.0, 8.0, 4.0, 4.0, 4.0, 0.0),
    ]
    order = gpipe_order(3, 6)
    file = saved(tmp_path, order, bounds_from_times(build_dag(order), stages), layers=(1, 1, 4))
    default, best = answer(
        file,
        grid(
            schedules=("GPipe",),
            microbatches=(6,),
            splits=(DEFAULT_SPLIT, BEST_SPLIT),
            n_ranks=3,
        ),
    ).cases
    assert default.best_unfrozen_layers == best.layers == best.best_unfrozen_layers == (2, 2, 2)
    # 8 slots of 6 ms if even; as measured the last stage works 6 times 12 ms, with 3 ms of each
    # other stage before and after.
    assert best.step_ms == pytest.approx(8 * 6.0)
    assert default.best_unfrozen_step_ms == pytest.approx(48.0)
    assert default.step_ms == pytest.approx(6 * 12.0 + 2 * 3.0)
    assert default.gain_over_best_unfrozen == pytest.approx(48.0 / default.frozen_step_ms - 1.0)


def test_a_split_by_hand_and_splits_that_are_none(even: BoundsFile) -> None:
    found = answer(even, grid(splits=((3, 2, 2, 1), (4, 4), (2, 2, 2, 3), (6, 0, 1, 1))))
    (case,) = found.cases
    assert case.layers == (3, 2, 2, 1)
    notes = "\n".join(found.notes)
    assert "left out 1F1B, 8 microbatches, split 4,4: it has 2 stages, the schedule 4" in notes
    assert "split 2,2,2,3: the split 2,2,2,3 has 9 layers; the model has 8" in notes
    assert "split 6,0,1,1: the split 6,0,1,1 leaves a stage without layers" in notes


def test_cases_that_cannot_be_are_left_out_with_a_note(even: BoundsFile) -> None:
    found = answer(even, grid(schedules=("1F1B", "GPipe"), microbatches=(2, 8)))
    assert [(c.schedule, c.n_microbatches) for c in found.cases] == [
        ("1F1B", 8), ("GPipe", 2), ("GPipe", 8),
    ]  # fmt: skip
    assert any(
        "left out 1F1B, 2 microbatches: the number of microbatches is 2" in note
        for note in found.notes
    )


def test_nothing_to_plan_is_an_error(even: BoundsFile) -> None:
    with pytest.raises(ValueError, match=r"(?s)nothing can be planned.*'nosuch' is no schedule"):
        answer(even, grid(schedules=("nosuch",)))


def test_without_layers_only_the_measured_split_is_planned(tmp_path: Path) -> None:
    order = gpipe_order(2, 4)
    file = saved(tmp_path, order, random_bounds(build_dag(order), seed=1))
    found = answer(file, grid(schedules=("GPipe", "Interleaved1F1B"), n_ranks=2, microbatches=(4,)))
    (case,) = found.cases
    assert (case.layers, case.best_unfrozen_layers, case.best_unfrozen_step_ms) == (
        None,
        None,
        None,
    )
    assert case.gain_over_best_unfrozen is None
    assert case.tokens_per_second is None
    notes = "\n".join(found.notes)
    assert "tell with --layers" in notes
    assert "it has 4 stages, 2 were measured" in notes


def test_two_stages_do_not_tell_a_layer(tmp_path: Path) -> None:
    order = gpipe_order(2, 4)
    file = saved(tmp_path, order, random_bounds(build_dag(order), seed=1))
    found = answer(file, grid(schedules=("GPipe",), n_ranks=2), layers=(3, 3))
    assert any("2 stages with 3,3 layers do not tell" in note for note in found.notes)
    assert found.cases[0].layers is None


def test_a_step_has_its_batches_and_what_is_outside(even: BoundsFile) -> None:
    (batch,) = answer(even, grid()).cases
    (step,) = answer(even, grid(batches=3, outside_ms=7.0)).cases
    assert step.step_ms == pytest.approx(3 * batch.step_ms + 7.0)
    assert step.frozen_step_ms == pytest.approx(3 * batch.frozen_step_ms + 7.0)
    assert step.all_frozen_step_ms == pytest.approx(3 * batch.all_frozen_step_ms + 7.0)
    assert batch.best_unfrozen_step_ms is not None
    assert step.best_unfrozen_step_ms == pytest.approx(3 * batch.best_unfrozen_step_ms + 7.0)
    assert step.bubble == batch.bubble
    assert step.frozen_microbatch_ms == pytest.approx(step.frozen_step_ms / 24)
    assert step.tokens_per_second == pytest.approx(1e3 * 100 * 24 / step.frozen_step_ms / 4)


def test_messages_make_a_batch_longer(even: BoundsFile) -> None:
    (without,) = answer(even, grid(schedules=("GPipe",))).cases
    (with_them,) = answer(even, grid(schedules=("GPipe",), p2p_overhead_ms=0.5)).cases
    # On the longest path: each rank but the first receives M activations, each but the last M
    # gradients; rank 3 is reached after 3 messages, and works its M forwards with one each.
    order = gpipe_order(N_RANKS, 8)

    def duration_ms(action: Action) -> float:
        forward = action.kind.value == "F"
        receives = action.stage > 0 if forward else action.stage < N_RANKS - 1
        return (2.0 if forward else 4.0) + 0.5 * receives

    ends = simulate(order, duration_ms)
    assert with_them.step_ms == pytest.approx(max(end for _, end in ends.values()))
    assert with_them.step_ms > without.step_ms


def test_ranks_that_fraction_processors(even: BoundsFile) -> None:
    (case,) = answer(even, grid(n_processors=1.0, caps=(1.0,))).cases
    # One processor does all the work: 4 ranks, 8 microbatches, 6 and 4 ms.
    assert case.step_ms == pytest.approx(4 * 8 * 6.0)
    assert case.frozen_step_ms == pytest.approx(4 * 8 * 4.0)
    assert (case.bubble, case.frozen_bubble) == (pytest.approx(0.0), pytest.approx(0.0))


def test_recall_tells_what_times_of_stages_cost(tmp_path: Path) -> None:
    order = hand_order("two_by_two")
    dag = build_dag(order)
    times = {"0F0": 1.0, "0F1": 3.0, "1F0": 2.0, "1F1": 2.0, "1B0": 4.0, "1B1": 8.0, "0B0": 5.0,
             "0B1": 7.0}  # fmt: skip
    longest = np.array([times[str(action)] for action in dag.actions])
    bounds = DurationBounds(min_ms=longest.copy(), max_ms=longest)
    # By hand: 0F0 0-1, 0F1 1-4, 1F0 1-3, 1F1 4-6, 1B0 6-10, 1B1 10-18, 0B0 10-15, 0B1 18-25.
    # F of 2 and B of 6 on both stages: 0F1 2-4, 1F1 4-6, 1B0 6-12, 1B1 12-18, 0B1 18-24.
    assert recall(saved(tmp_path, order, bounds)) == (25.0, 24.0)
    (tmp_path / "schedule.csv").unlink()
    assert recall(read_bounds_file(tmp_path / "bounds.json")) is None


def test_what_is_derived_is_said(tmp_path: Path, even: BoundsFile) -> None:
    notes = answer(even, grid()).notes
    assert any(note.startswith("times of I and W are derived") for note in notes)
    assert any("a layer's time is that of the stages in the middle" in note for note in notes)
    profiled = replace(
        even,
        metadata=replace(even.metadata, stages=(EVEN,) * 4, layer=LAYER, fixed=StageTimes()),
    )
    (note,) = answer(profiled, grid()).notes
    assert note.startswith("messages between ranks cost nothing")


def test_an_older_file_is_planned_for(tmp_path: Path) -> None:
    order = one_f_one_b_order(4, 8)
    dag = build_dag(order)
    path = tmp_path / "bounds.json"
    path.write_text(bounds_to_json(dag, random_bounds(dag, seed=9)))
    found = answer(read_bounds_file(path), grid(caps=(0.3, 0.8)), layers=(2, 3, 3, 2))
    low, high = found.cases
    assert low.frozen_step_ms >= high.frozen_step_ms >= high.all_frozen_step_ms
    assert isinstance(low, Case)


def test_what_noise_has_pinned_is_said(tmp_path: Path) -> None:
    noisy = StageTimes(6.0, 5.0, 4.5, 4.5, 0.5, 0.0)  # one layer less would save 2 and 1 ms
    order = gpipe_order(4, 8)
    file = saved(
        tmp_path, order, bounds_from_times(build_dag(order), [EVEN] * 3 + [noisy]), layers=(2,) * 4
    )
    found = answer(file, grid(schedules=("GPipe",), splits=((3, 2, 2, 1), (2, 2, 2, 2))))
    (note,) = [note for note in found.notes if "comes out no faster frozen" in note]
    assert note.startswith("split 3,2,2,1: a backward of stage 3")
    assert len(found.cases) == 2
