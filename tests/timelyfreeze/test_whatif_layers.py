"""Stages of other splits, against sums by hand; the best split, against all splits."""

import itertools
import random
from collections.abc import Iterator

import pytest
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from tests.timelyfreeze.pipelines import hand_order, simulate
from timelyfreeze import whatif_layers
from timelyfreeze.actions import Action
from timelyfreeze.dag import build_dag
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.schedules import gpipe_order, one_f_one_b_order
from timelyfreeze.whatif_layers import (
    LayerModel,
    Split,
    best_split,
    default_split,
    layer_model,
    layer_prices,
    render_split,
)
from timelyfreeze.whatif_times import StageTimes

LAYER = StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
NOTHING = StageTimes()
HAIR = StageTimes(frozen_weight_ms=0.01)
# Embedding: 1 ms forward, 1 ms backward. Head and loss: 6 ms forward, 12 ms backward.
FIRST = StageTimes(7.0, 13.0, 0.0, 0.0, 13.0, 0.0)  # 3 layers; no input gradient, frozen whole
MIDDLE = StageTimes(6.0, 12.0, 6.0, 6.0, 6.0, 0.0)  # 3 layers
LAST = StageTimes(12.0, 24.0, 12.0, 12.0, 12.0, 0.0)  # 3 layers
MODEL = layer_model([FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3])
# As the measured first stage, but less than what its layers take elsewhere.
LIGHT_FIRST = StageTimes(5.0, 9.0, 0.0, 0.0, 9.0, 0.0)


def test_the_middle_tells_what_a_layer_takes() -> None:
    assert MODEL.layer == LAYER
    assert MODEL.fixed == NOTHING
    # 20 ms over 5 layers in the middle.
    uneven = layer_model([FIRST, StageTimes(12.0), StageTimes(8.0), LAST], [3, 3, 2, 4])
    assert uneven.layer.forward_ms == 4.0


def test_the_measured_split_takes_what_was_measured() -> None:
    odd = StageTimes(6.5, 11.0, 5.5, 6.0, 5.0, 0.25)
    model = layer_model([FIRST, odd, MIDDLE, LAST], [3, 3, 3, 3])
    assert model.times([3, 3, 3, 3]) == (FIRST, odd, MIDDLE, LAST)


def test_a_layer_takes_its_price_along() -> None:
    first, giver, taker, last = MODEL.times([4, 2, 5, 1])
    assert giver == StageTimes(4.0, 8.0, 4.0, 4.0, 4.0, 0.0)
    assert taker == StageTimes(10.0, 20.0, 10.0, 10.0, 10.0, 0.0)
    assert last == StageTimes(8.0, 16.0, 8.0, 8.0, 8.0, 0.0)
    # In front a layer brings its whole backward into W and nothing into I; frozen it is free.
    assert first == StageTimes(9.0, 17.0, 0.0, 0.0, 17.0, 0.0)


def test_a_first_stage_that_keeps_its_chain_stays_as_frozen_as_it_was() -> None:
    kept = StageTimes(7.0, 12.0, 6.0, 0.0, 12.0, 6.0)
    first = layer_model([kept, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3]).times([1, 4, 4, 3])[0]
    assert (first.backward_ms, first.frozen_backward_ms) == (4.0, 2.0)
    assert (first.weight_ms, first.frozen_weight_ms) == (4.0, 2.0)


def test_another_number_of_stages() -> None:
    model = layer_model([FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3], LAYER, StageTimes(0.5, 1.0))
    stages = model.times([1, 2, 2, 2, 2, 2, 1, 0])
    assert stages[1] == StageTimes(4.5, 9.0, 4.0, 4.0, 4.0, 0.0)  # the fixed price and 2 layers
    assert stages[6] == StageTimes(2.5, 5.0, 2.0, 2.0, 2.0, 0.0)
    assert (stages[0].forward_ms, stages[7].forward_ms) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([12], "has fewer than 2 stages"),
        ([3, 3, 3, 4], "has 13 layers; the model has 12"),
        ([6, 0, 3, 3], "leaves a stage without layers"),
        ([6, -1, 4, 3], "leaves a stage without layers"),
    ],
)
def test_refuses_splits_that_are_none(split: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODEL.times(split)


def test_refuses_what_the_measurements_cannot_tell() -> None:
    with pytest.raises(ValueError, match="2 stages with 6,6 layers do not tell"):
        layer_model([FIRST, LAST], [6, 6])
    assert layer_model([FIRST, LAST], [3, 3], LAYER).times([4, 2])[1].forward_ms == 10.0
    with pytest.raises(ValueError, match=r"layers are given for 3 stages \(1,2,3\)"):
        layer_model([FIRST, LAST], [1, 2, 3])
    light = layer_model([LIGHT_FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3])
    with pytest.raises(ValueError, match=r"out of .* reach: stage 0: forward_ms would be -1"):
        light.times([0, 4, 4, 4])


def test_a_backward_that_comes_out_no_faster_frozen_is_left_unfrozen() -> None:
    # Without its 3 layers this last stage would take 3 ms unfrozen and 4 ms frozen.
    noisy = StageTimes(12.0, 15.0, 10.0, 10.0, 5.0, 0.5)
    model = layer_model([FIRST, MIDDLE, MIDDLE, noisy], [3, 3, 3, 3])
    last = model.times([3, 5, 4, 0])[-1]
    assert (last.backward_ms, last.frozen_backward_ms) == (3.0, 3.0)
    assert (last.weight_ms, last.frozen_weight_ms) == (0.0, 0.0)  # 5 - 3 * 2, below 0
    assert model.pinned([3, 5, 4, 0]) == [3]
    assert model.pinned([3, 3, 3, 3]) == []
    # A hair below 0 where nothing is left to do is no reason to say so.
    hair = layer_model([FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3], LAYER.plus(HAIR))
    assert hair.times([3, 4, 4, 1])[-1].frozen_weight_ms == 0.0
    assert hair.pinned([3, 4, 4, 1]) == []


def test_prices_from_two_sizes() -> None:
    one = StageTimes(2.5, 4.5, 2.5, 2.25, 2.25, 0.2)
    many = StageTimes(8.5, 16.5, 8.5, 8.25, 8.25, 0.1)  # 4 layers; frozen W is noise
    layer, fixed = layer_prices(one, many, 4)
    assert layer == StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
    assert fixed == StageTimes(0.5, 0.5, 0.5, 0.25, 0.25, 0.1)
    assert fixed.plus(layer, 4) == many


def test_refuses_prices_that_noise_does_not_explain() -> None:
    with pytest.raises(ValueError, match=r"forward_ms is 8 with 4 layers and 9 with 1"):
        layer_prices(StageTimes(9.0, 4.0, 2.0), StageTimes(8.0, 16.0, 8.0), 4)
    with pytest.raises(ValueError, match="price of a layer comes out impossible: B would take"):
        layer_prices(StageTimes(2.0, 4.0, 2.0), StageTimes(8.0, 8.0, 8.0), 4)


@pytest.mark.parametrize("n_layers", [6, 10, 16, 32, 33])
@pytest.mark.parametrize("n_stages", [2, 4, 5, 8])
def test_the_default_cut_is_upstreams(n_layers: int, n_stages: int) -> None:
    cut = generate_llm_fqn_per_model_part(n_stages, n_layers)
    layers = tuple(sum(name.startswith("layers.") for name in names) for names in cut)
    assert default_split(n_layers, n_stages) == layers


def test_refuses_more_stages_than_there_is_to_cut() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be cut into 6 stages"):
        default_split(3, 6)


def all_splits(n_layers: int, n_stages: int) -> Iterator[Split]:
    """Every way to hand out the layers, written without looking at the library."""
    for cuts in itertools.product(range(n_layers + 1), repeat=n_stages - 1):
        last = n_layers - sum(cuts)
        if last >= 0 and min(cuts[1:], default=1) >= 1:
            yield (*cuts, last)


def batch_ms(order: ScheduleOrder, model: LayerModel, split: Split) -> float:
    """The end of the last action, by a simulation of the ranks."""
    stages = model.times(split)

    def duration_ms(action: Action) -> float:
        return stages[action.stage].bounds_of(action.kind)[1]

    return max(end for _, end in simulate(order, duration_ms).values())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "order", [gpipe_order(4, 4), one_f_one_b_order(4, 6)], ids=["gpipe", "1f1b"]
)
def test_no_split_is_faster_than_the_best(order: ScheduleOrder, seed: int) -> None:
    rng = random.Random(seed)
    head_ms = rng.choice([0.0, 3.0, 9.0, 20.0])
    last = MIDDLE.plus(StageTimes(head_ms, 2 * head_ms, head_ms, head_ms, head_ms, 0.0))
    model = layer_model([FIRST, MIDDLE, MIDDLE, last], [3, 3, 3, 3])
    found = best_split(model, build_dag(order))
    fastest = min(batch_ms(order, model, split) for split in all_splits(12, 4))
    assert batch_ms(order, model, found) == pytest.approx(fastest, rel=1e-12)


def test_ranks_with_several_stages_are_made_even() -> None:
    order = hand_order("interleaved")
    split = best_split(MODEL, build_dag(order))
    fastest = min(batch_ms(order, MODEL, other) for other in all_splits(12, 4))
    assert batch_ms(order, MODEL, split) == pytest.approx(fastest)


@pytest.mark.parametrize("head", [(2.0, 20.0), (9.0, 1.0), (0.0, 0.0)])
def test_where_a_search_would_take_too_long_the_fullest_rank_has_least_to_do(
    head: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif_layers, "_MOST_ACTIONS_IN_ROUND", 0)
    last = MIDDLE.plus(StageTimes(head[0], head[1], head[1] / 2, head[1] / 2, head[1] / 2, 0.0))
    model = layer_model([FIRST, MIDDLE, MIDDLE, last], [3, 3, 3, 3])
    order = hand_order("interleaved")

    def fullest_ms(split: Split) -> float:
        work = [0.0] * order.n_ranks
        for stage, times in enumerate(model.times(split)):
            work[order.stage_to_rank[stage]] += times.forward_ms + times.backward_ms
        return max(work)

    found = best_split(model, build_dag(order))
    assert fullest_ms(found) == pytest.approx(min(map(fullest_ms, all_splits(12, 4))))


def test_the_best_split_is_no_slower_than_those_it_starts_from() -> None:
    order = one_f_one_b_order(4, 8)
    start = (6, 2, 2, 2)
    split = best_split(MODEL, build_dag(order), also=[start])
    assert batch_ms(order, MODEL, split) <= batch_ms(order, MODEL, start)
    assert sum(split) == 12


def test_a_stage_keeps_the_layers_that_its_times_hold() -> None:
    # Without its 3 layers the first stage would take -1 ms.
    light = layer_model([LIGHT_FIRST, MIDDLE, MIDDLE, LAST], [3, 3, 3, 3])
    assert light.stage(0, 4, 0).mistakes()
    assert not light.stage(0, 4, 1).mistakes()
    assert best_split(light, build_dag(gpipe_order(4, 1)))[0] >= 1
    with pytest.raises(ValueError, match="2 layers are too few for 5 stages"):
        best_split(layer_model([FIRST, LAST], [1, 1], LAYER), build_dag(gpipe_order(5, 1)))


def test_a_split_as_text() -> None:
    assert render_split((9, 8, 8, 7)) == "9,8,8,7"
