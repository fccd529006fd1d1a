"""Frozen fronts in whole pipelines, against closed forms, a search and a simulation."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.helpers.pipelines import simulate
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, ScheduleOrder, gpipe_order, one_f_one_b_order
from timelyfreeze.whatif import fronts as front_cases
from timelyfreeze.whatif.bounds_file import (
    BoundsFile,
    PipelineMetadata,
    bounds_file_text,
    read_bounds_file,
)
from timelyfreeze.whatif.fronts import FrontCase, answer_fronts, front_times
from timelyfreeze.whatif.grid import BEST_SPLIT, DEFAULT_SPLIT, Grid
from timelyfreeze.whatif.layer_model import LayerModel, layer_model
from timelyfreeze.whatif.partition import PartParameters
from timelyfreeze.whatif.rank_memory import ModelBytes, PartBytes
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

pytestmark = pytest.mark.slow

S, M = 4, 8
MAKERS = {"GPipe": gpipe_order, "1F1B": one_f_one_b_order}
LAYER = StageTimes(1.0, 2.0, 1.0, 1.0, 1.0, 0.0)
F, B = 2.0, 4.0  # of a stage of two layers
# One byte for each live layer and microbatch that is kept, and one for the weights of any layer.
NO_BYTES = PartBytes(0, 0, 0, 0, 0)
MEMORY = ModelBytes(NO_BYTES, PartBytes(1, 0, 1, 0, 0), NO_BYTES, NO_BYTES, 0, 0, 0, 0)


def saved(folder: Path, stages: list[StageTimes], **notes: Any) -> BoundsFile:
    dag = build_dag(gpipe_order(len(stages), M))
    path = folder / "bounds.json"
    told = PipelineMetadata(ranks=len(stages), **notes)
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, stages), told))
    return read_bounds_file(path)


@pytest.fixture
def even(tmp_path: Path) -> BoundsFile:
    """Four stages of 2 alike layers, no embedding and no head."""
    return saved(tmp_path, [LAYER.plus(LAYER)] * S, layers=(2,) * S)


def grid(**changes: Any) -> Grid:
    whole = Grid(("GPipe",), (), (M,), (DEFAULT_SPLIT,), n_ranks=S)
    return replace(whole, **changes)


def cases(file: BoundsFile, *frozen: int, partition: str | None = None, **changes: Any) -> Any:
    return answer_fronts(file, grid(**changes), frozen, partition=partition).cases


@pytest.mark.parametrize("schedule", MAKERS)
@pytest.mark.parametrize("f", [1, 2, 3])
def test_whole_frozen_stages_follow_the_closed_form(
    even: BoundsFile, schedule: str, f: int
) -> None:
    (case,) = cases(even, 2 * f, schedules=(schedule,))
    assert case.unfrozen_ms == pytest.approx((M + S - 1) * (F + B))
    live_ms = (M + S - f - 1) * (F + B)
    assert case.cached_ms == pytest.approx(live_ms)
    assert case.run_ahead_ms == pytest.approx(live_ms)
    # The fill of the front is waited for; from there on live stages are a pipeline of their own.
    assert case.frozen_ms == pytest.approx(live_ms + f * F)
    assert case.layers == (2, 2, 2, 2)


def test_gpipe_alone_as_drawn(even: BoundsFile) -> None:
    for f in (1, 2, 3):
        (case,) = cases(even, 2 * f)
        assert case.frozen_ms == pytest.approx((M + S - 1) * F + (M + S - f - 1) * B)


def test_a_front_within_the_first_stage(even: BoundsFile) -> None:
    (case,) = cases(even, 1)
    # Its backward takes half as long; the others are the bottleneck, so only the last one counts.
    assert case.frozen_ms == pytest.approx((M + S - 1) * (F + B) - B / 2)
    assert case.cached_ms == pytest.approx((M + S - 1) * (F + B) - B / 2 - F / 2)
    assert case.run_ahead_ms is None


UNEVEN = [
    StageTimes(3.0, 5.0, 0.0, 0.0, 5.0, 0.0),
    StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0),
    StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0),
    StageTimes(4.0, 7.0, 4.0, 4.0, 3.0, 0.0),
]


def simulated_ms(order: ScheduleOrder, times: tuple[StageTimes, ...]) -> float:
    def duration_ms(action: Action) -> float:
        return times[action.stage].bounds_of(action.kind)[1]

    return max(end for _, end in simulate(order, duration_ms).values())


@pytest.mark.parametrize("schedule", MAKERS)
@pytest.mark.parametrize("n_frozen", [1, 3, 5, 7])
def test_the_split_is_the_best_of_all(
    tmp_path: Path, schedule: str, n_frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a look at every split; a search one layer at a time comes near it."""
    layers = (2, 2, 2, 2)
    file = saved(tmp_path, UNEVEN, layers=layers)
    (case,) = cases(file, n_frozen, schedules=(schedule,))
    monkeypatch.setattr(front_cases, "_MAX_ACTIONS_OF_ALL", 0)
    (searched,) = cases(file, n_frozen, schedules=(schedule,))
    model = layer_model(UNEVEN, layers)
    order = MAKERS[schedule](S, M)
    assert case.frozen_ms == pytest.approx(
        simulated_ms(order, front_times(model, layers, n_frozen))
    )
    found = {
        split: simulated_ms(order, front_times(model, split, n_frozen))
        for split in every_split(model)
    }
    assert case.resplit_ms == pytest.approx(min(found.values()))
    assert searched.resplit_ms <= min(found.values()) * 1.05
    assert searched.frozen_ms == case.frozen_ms
    for each in (case, searched):
        assert found[each.resplit_layers] == pytest.approx(each.resplit_ms)
        assert each.resplit_ms <= each.frozen_ms + 1e-9


def every_split(model: LayerModel) -> list[tuple[int, ...]]:
    least = model.least_layers(S)
    ranges = [range(n, model.n_layers + 1) for n in least]
    return [s for s in itertools.product(*ranges) if sum(s) == model.n_layers]


def test_of_splits_that_are_as_good_the_one_that_is_there_stays(even: BoundsFile) -> None:
    model = layer_model([LAYER.plus(LAYER)] * S, (2,) * S)
    order = gpipe_order(S, M)
    found = {s: simulated_ms(order, front_times(model, s, 6)) for s in every_split(model)}
    best = [split for split, ms in found.items() if ms == min(found.values())]
    assert len(best) > 1
    for split in best:
        assert cases(even, 6, splits=(split,))[0].resplit_layers == split


def test_split_backwards_have_no_input_half_at_the_end_of_the_front(even: BoundsFile) -> None:
    from timelyfreeze.runtime.torch_pipelining import named_order

    (case,) = cases(even, 3, schedules=("ZBVZeroBubble",), splits=((1,) * 8,))
    order = named_order("ZBVZeroBubble", S, M, stages_per_rank=2)

    def duration_ms(action: Action) -> float:
        if action.kind.value == "F":
            return 1.0
        if action.stage < 3:
            return 0.0
        if action.stage == 3:
            return {"B": 2.0, "I": 0.0, "W": 2.0}[action.kind.value]
        return {"B": 2.0, "I": 1.0, "W": 1.0}[action.kind.value]

    ends = simulate(order, duration_ms)
    assert case.frozen_ms == pytest.approx(max(end for _, end in ends.values()))
    assert case.shrunk_ranks is None
    notes = answer_fronts(
        even, grid(schedules=("ZBVZeroBubble",), splits=((1,) * 8,)), (3, 4)
    ).notes
    assert [n for n in notes if "shrink" in n] == [
        "left out shrinking of ZBVZeroBubble: AutoPipe gives each rank one stage; this schedule "
        "has more"
    ]


def test_messages_cost_what_they_do(even: BoundsFile) -> None:
    (case,) = cases(even, 4, p2p_overhead_ms=0.5)

    def duration_ms(action: Action) -> float:
        forward = action.kind.value == "F"
        receives = action.stage > 0 if forward else action.stage < S - 1
        work = F if forward else B * (action.stage >= 2)
        # Stages in front still get zeros, as a run sends them.
        return work + 0.5 * receives

    ends = simulate(gpipe_order(S, M), duration_ms)
    assert case.frozen_ms == pytest.approx(max(end for _, end in ends.values()))
    # Behind the front: stage 2 receives no activations and stage 3 no gradients.
    two = simulate(
        gpipe_order(2, M),
        lambda a: (F + 0.5 * a.stage) if a.kind.value == "F" else B + 0.5 * (1 - a.stage),
    )
    assert case.cached_ms == pytest.approx(max(end for _, end in two.values()))


def test_ranks_that_share_processors(even: BoundsFile) -> None:
    (case,) = cases(even, 4, n_processors=1.0, partition="time")
    # One core does everything in turn.
    assert case.unfrozen_ms == pytest.approx(M * S * (F + B))
    assert case.frozen_ms == pytest.approx(M * (S * F + 2 * B))
    assert case.cached_ms == pytest.approx(M * 2 * (F + B))
    assert case.run_ahead_ms == pytest.approx(M * (S * F + 2 * B))
    # Two pipelines of two share it as well.
    assert case.shrunk_ranks is not None
    assert case.shrunk_replicas is not None
    assert case.shrunk_ranks * case.shrunk_replicas == S
    assert case.shrunk_ms == pytest.approx(M * (S * F + 2 * B))


class TestShrinking:
    """What is left of four ranks with two layers each."""

    @staticmethod
    def shrunk(file: BoundsFile, n_frozen: int, **changes: Any) -> Any:
        (case,) = cases(file, n_frozen, **changes)
        assert isinstance(case, FrontCase)
        assert case.shrunk_ranks is not None
        return case

    def test_by_time_without_sizes(self, even: BoundsFile) -> None:
        # 6 frozen layers take 6 ms, 2 live ones 6: one rank would have 12, as much as two had.
        found = self.shrunk(even, 6)
        assert found.shrunk_partition == "time"
        assert (found.shrunk_ranks, found.shrunk_layers, found.shrunk_replicas) == (2, (6, 2), 2)
        # 4 microbatches for each of two: 4 F of 6, then F and B of 2 + 4 at the end of GPipe.
        assert found.shrunk_microbatches == 4
        assert found.shrunk_ms == pytest.approx(4 * 6.0 + 2.0 + 4 * 4.0)

    def test_by_parameters_if_they_are_told(self, tmp_path: Path) -> None:
        sizes = PartParameters(0, (6_000_000,) * 8, 0)
        file = saved(tmp_path, [LAYER.plus(LAYER)] * S, layers=(2,) * S, parameters=sizes)
        found = self.shrunk(file, 6)
        assert found.shrunk_partition == "parameters"
        # M0 is 12 million. 36 / 6 frozen and 12 live: for K = 1 18, too many; for K = 2 rank 0
        # has 6 and no live layer, as 12 is not below 6, and rank 1 the two: 12.
        assert (found.shrunk_ranks, found.shrunk_layers) == (2, (6, 2))
        assert found.exchange_ms is None
        # At 10 GB/s two replicas of two live layers: a layer's 24 million bytes go half there and
        # half back, twice, which takes 2.4 ms, and 0.1 for its message.
        told = self.shrunk(file, 6, link_gb_per_s=10.0, p2p_overhead_ms=0.1)
        assert told.exchange_ms == pytest.approx(2 * (2.4 + 0.1))
        # One pipeline has nobody to send to.
        alone = self.shrunk(file, 1, link_gb_per_s=10.0)
        assert (alone.shrunk_replicas, alone.exchange_ms) == (1, 0.0)
        # By time too, where that is asked for.
        assert self.shrunk(file, 6, partition="time").shrunk_partition == "time"

    def test_one_rank_needs_no_pipeline(self, tmp_path: Path) -> None:
        stages = [LAYER.plus(LAYER)] * S
        sizes = PartParameters(30_000_000, (6_000_000,) * 8, 0)
        file = saved(tmp_path, stages, layers=(2,) * S, parameters=sizes)
        # The first rank had an embedding of 30 million, 42 in all: (30 + 36) / 6 + 12 = 23.
        found = self.shrunk(file, 6, schedules=("1F1B",))
        assert (found.shrunk_ranks, found.shrunk_replicas, found.shrunk_layers) == (1, 4, (8,))
        assert found.shrunk_microbatches == 2
        assert found.shrunk_ms == pytest.approx(2 * (8 * 1.0 + 2 * 2.0))
        # Without it M0 is 12 million, and 42 / 6 + 6 is one too much.
        light = replace(file.metadata, parameters=PartParameters(0, (6_000_000,) * 8, 0))
        assert self.shrunk(replace(file, metadata=light), 7).shrunk_ranks == 2

    def test_the_memory_that_was_there_is_the_limit_by_time(self, tmp_path: Path) -> None:
        stages = [LAYER.plus(LAYER)] * S
        file = saved(tmp_path, stages, layers=(2,) * S, memory=MEMORY)
        # At the start under GPipe: 2 layers of 8 microbatches, and 4 x 2 for weights: 24 each.
        # Two ranks, 4 microbatches: l live ones take 4 l + 4 l; k frozen ones k, Adam's 2 k, and 1
        # while one of them runs.
        assert self.shrunk(file, 3).shrunk_ranks == 4  # 2 of 5 live ones beside 3 frozen: 26
        found = self.shrunk(file, 4)
        assert (found.shrunk_ranks, found.shrunk_layers) == (2, (5, 3))  # 21 and 24
        # One rank, 2 microbatches: 6 l + 3 k + 1 <= 24.
        assert self.shrunk(file, 7).shrunk_ranks == 2  # 6 + 21 + 1

    def test_parameters_that_are_not_told_cannot_be_asked_for(self, even: BoundsFile) -> None:
        found = answer_fronts(even, grid(), (2,), partition="parameters")
        assert found.cases[0].shrunk_ranks is None
        assert any("does not tell how many parameters" in note for note in found.notes)


def test_every_combination_has_a_case(even: BoundsFile) -> None:
    found = cases(
        even,
        2,
        5,
        schedules=("GPipe", "1F1B"),
        microbatches=(4, 8),
        splits=(DEFAULT_SPLIT, BEST_SPLIT, (1, 2, 2, 3)),
    )
    assert len(found) == 2 * 2 * 3 * 2
    assert [case.n_frozen for case in found[:2]] == [2, 5]
    assert {case.layers for case in found if case.split == "1,2,2,3"} == {(1, 2, 2, 3)}


def test_what_cannot_be_is_left_out_with_a_note(even: BoundsFile) -> None:
    found = answer_fronts(even, grid(splits=(DEFAULT_SPLIT, (4, 4))), (2, 8))
    assert [case.n_frozen for case in found.cases] == [2]
    notes = "\n".join(found.notes)
    assert "split 4,4: it has 2 stages" in notes
    assert "split default, 8 frozen layers: 8 layers of 8 would be frozen; it must be 1" in notes


def test_layers_that_nobody_knows_cannot_be_frozen(tmp_path: Path) -> None:
    file = saved(tmp_path, UNEVEN)
    with pytest.raises(ValueError, match=r"(?s)nothing can be planned.*layers cannot be told apar"):
        answer_fronts(file, grid(), (2,))
    assert answer_fronts(file, grid(), (2,), layers=(2, 2, 2, 2)).cases
