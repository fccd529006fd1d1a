"""Stages of other splits, against sums by hand."""

import pytest

from tests.timelyfreeze.whatif.stages_by_hand import (
    FIRST,
    HAIR,
    LAST,
    LAYER,
    LIGHT_FIRST,
    MIDDLE,
    MODEL,
    NOTHING,
)
from timelyfreeze.whatif.layer_model import layer_model, layer_overheads
from timelyfreeze.whatif.times import StageTimes


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


def test_a_layer_takes_its_overhead_along() -> None:
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
    assert stages[1] == StageTimes(4.5, 9.0, 4.0, 4.0, 4.0, 0.0)  # the fixed overhead and 2 layers
    assert stages[6] == StageTimes(2.5, 5.0, 2.0, 2.0, 2.0, 0.0)
    assert (stages[0].forward_ms, stages[7].forward_ms) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("split", "message"),
    [
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


def test_overheads_from_two_sizes() -> None:
    one = StageTimes(2.5, 4.5, 2.5, 2.25, 2.25, 0.2)
    many = StageTimes(8.5, 16.5, 8.5, 8.25, 8.25, 0.1)  # 4 layers; frozen W is noise
    layer, fixed = layer_overheads(one, many, 4)
    assert layer == StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)
    assert fixed == StageTimes(0.5, 0.5, 0.5, 0.25, 0.25, 0.1)
    assert fixed.plus(layer, 4) == many


def test_refuses_overheads_that_noise_does_not_explain() -> None:
    with pytest.raises(ValueError, match=r"forward_ms is 8 with 4 layers and 9 with 1"):
        layer_overheads(StageTimes(9.0, 4.0, 2.0), StageTimes(8.0, 16.0, 8.0), 4)
    with pytest.raises(ValueError, match="overhead of a layer comes out impossible: B would take"):
        layer_overheads(StageTimes(2.0, 4.0, 2.0), StageTimes(8.0, 8.0, 8.0), 4)
