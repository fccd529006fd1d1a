"""Stages behind and in a frozen front, against sums by hand."""

import pytest

from tests.timelyfreeze.whatif.stages_by_hand import FIRST, LAST, LAYER, MIDDLE, MODEL
from timelyfreeze.whatif.fronts import (
    front_times,
    layer_times,
    stages_in_front,
)
from timelyfreeze.whatif.layer_model import layer_model
from timelyfreeze.whatif.times import StageTimes

SPLIT = (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("split", "n_frozen", "n_front"),
    [
        (SPLIT, 0, 0),
        (SPLIT, 2, 0),
        (SPLIT, 3, 1),
        (SPLIT, 7, 2),
        (SPLIT, 11, 3),
        ((0, 4, 8), 1, 1),  # the embedding alone in front
        ((6, 6, 0), 11, 1),  # the head alone at the end
        ((12,), 5, 0),
    ],
)
def test_layers_in_front(split: tuple[int, ...], n_frozen: int, n_front: int) -> None:
    assert stages_in_front(split, n_frozen) == n_front


def test_a_stage_in_front_has_a_forward_and_the_next_one_sends_no_gradient() -> None:
    first, second, third, last = front_times(MODEL, SPLIT, 3)
    assert first == StageTimes(forward_ms=7.0)
    # All of it live: its backward as measured, and in split backwards all of it in W.
    assert second == StageTimes(6.0, 12.0, weight_ms=12.0)
    assert (third, last) == (MIDDLE, LAST)


def test_a_stage_in_which_the_front_ends_has_the_backward_of_its_live_layers() -> None:
    times = front_times(MODEL, SPLIT, 4)
    assert times[1] == StageTimes(6.0, 8.0, weight_ms=8.0)
    # A frozen embedding alone in front, and a live head alone at the end.
    assert front_times(MODEL, (0, 4, 8), 1)[1] == StageTimes(8.0, 12.0, weight_ms=12.0)
    assert front_times(MODEL, (6, 6, 0), 11)[1] == StageTimes(12.0, 4.0, weight_ms=4.0)
    # The last stage: head and loss, 12 ms, and one live layer of 4.
    assert front_times(MODEL, SPLIT, 11)[3] == StageTimes(12.0, 16.0, weight_ms=16.0)


def test_in_the_first_stage_the_embedding_is_frozen_too() -> None:
    # 13 ms are 3 layers of 4 and 1 for the embedding.
    assert front_times(MODEL, SPLIT, 1)[0] == StageTimes(7.0, 8.0, weight_ms=8.0)
    # Where it seems to take less than nothing, nothing more is taken off: 11 ms less a layer.
    light = layer_model([StageTimes(5.0, 11.0, 0.0, 0.0, 11.0), MIDDLE, MIDDLE, LAST], SPLIT)
    assert front_times(light, SPLIT, 1)[0] == StageTimes(5.0, 7.0, weight_ms=7.0)


def test_with_a_cache_the_forward_of_frozen_layers_falls_away() -> None:
    first, second, third, last = front_times(MODEL, SPLIT, 4, cached=True)
    assert first == StageTimes()
    assert second == StageTimes(4.0, 8.0, weight_ms=8.0)
    assert (third, last) == (MIDDLE, LAST)
    # The embedding's 1 ms too.
    assert front_times(MODEL, SPLIT, 1, cached=True)[0] == StageTimes(4.0, 8.0, weight_ms=8.0)


def test_the_whole_model_in_one_stage() -> None:
    # 12 layers of 2 + 4, embedding 1 + 1, head and loss 6 + 12.
    (whole,) = front_times(MODEL, (12,), 5)
    assert whole == StageTimes(24.0 + 1.0 + 6.0, 7 * 4.0 + 12.0, weight_ms=40.0)
    (cached,) = front_times(MODEL, (12,), 5, cached=True)
    assert cached.forward_ms == 7 * 2.0 + 6.0
    # What a stage takes besides its layers is paid once.
    with_fixed = layer_model([FIRST, MIDDLE, LAST], (3, 3, 3), LAYER, StageTimes(0.5, 0.25))
    (whole,) = front_times(with_fixed, (9,), 5)
    assert whole.forward_ms == pytest.approx(7.0 + 3 * 2.0 + 12.0 - 0.5)


def test_what_each_layer_takes() -> None:
    frozen = [3.0, 2.0, 2.0, 2.0, 2.0]
    assert layer_times(MODEL, 5) == [*frozen, *[6.0] * 6, 6.0 + 18.0]
    assert layer_times(MODEL, 11) == [3.0, *[2.0] * 10, 24.0]


@pytest.mark.parametrize("n_frozen", [0, 12])
def test_a_front_is_some_of_the_layers(n_frozen: int) -> None:
    with pytest.raises(ValueError, match=f"{n_frozen} layers of 12 would be frozen; it must be 1"):
        front_times(MODEL, SPLIT, n_frozen)


def test_what_the_measurements_do_not_reach_is_refused() -> None:
    quick = layer_model([FIRST, StageTimes(6.0, 7.0), MIDDLE, LAST], SPLIT, LAYER)
    with pytest.raises(ValueError, match=r"5 frozen layers of the split 3,3,3,3 .* stage 1: backw"):
        front_times(quick, SPLIT, 5)
