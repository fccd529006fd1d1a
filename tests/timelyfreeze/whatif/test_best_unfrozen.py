"""The best split without freezing, against all splits."""

import itertools
from collections.abc import Iterator

import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order, simulate
from tests.timelyfreeze.whatif.stages_by_hand import (
    FIRST,
    LAST,
    LAYER,
    LIGHT_FIRST,
    MIDDLE,
    MODEL,
)
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, ScheduleOrder, gpipe_order, one_f_one_b_order
from timelyfreeze.whatif import partition as best_unfrozen
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import LayerModel, layer_model
from timelyfreeze.whatif.partition import best_split
from timelyfreeze.whatif.times import StageTimes


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


@pytest.mark.slow
@pytest.mark.parametrize("head_ms", [0.0, 3.0, 9.0, 20.0])
@pytest.mark.parametrize(
    "order", [gpipe_order(4, 4), one_f_one_b_order(4, 6)], ids=["gpipe", "1f1b"]
)
def test_no_split_is_faster_than_the_best(order: ScheduleOrder, head_ms: float) -> None:
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
    monkeypatch.setattr(best_unfrozen, "_MAX_ACTIONS_IN_ROUND", 0)
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
    assert light.stage(0, 4, 0).errors()
    assert not light.stage(0, 4, 1).errors()
    assert best_split(light, build_dag(gpipe_order(4, 1)))[0] >= 1
    with pytest.raises(ValueError, match="2 layers are too few for 5 stages"):
        best_split(layer_model([FIRST, LAST], [1, 1], LAYER), build_dag(gpipe_order(5, 1)))
