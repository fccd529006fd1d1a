"""A checkpoint of some processes, gone on from by others."""

import copy
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.timelyfreeze.control.test_emulated import (
    LAST_STEP,
    ORDERS,
    PLACES,
    EmulatedRanks,
    whole_run,
)
from tests.timelyfreeze.helpers.pipelines import hand_order
from tests.timelyfreeze.helpers.ranks import PHASES, Ranks, linear_ms, without_stable_times
from timelyfreeze.control.state import merge_replicas
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.schedule.order import Action, ScheduleOrder, one_f_one_b_order

pytestmark = pytest.mark.slow

ORDER = one_f_one_b_order(2, 4)


class UnevenRanks(Ranks):
    """Every replica is slow at another stage: as slow as ``uneven_ms`` says of all together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._local = threading.local()
        self.duration_ms = self._of_replica_ms

    def one_batch(self, rank: int, **kwargs: Any) -> None:
        self._local.replica = rank // self.executed.n_ranks
        super().one_batch(rank, **kwargs)

    def _of_replica_ms(self, action: Action, fraction: float) -> float:
        is_slow = self.hub.size == 2 or action.stage == self._local.replica
        return uneven_ms(action, fraction) if is_slow else linear_ms(action, fraction)


def uneven_ms(action: Action, fraction: float) -> float:
    return (2.0 + action.stage) * linear_ms(action, fraction)


@cache
def undisturbed(monitoring: str) -> Ranks:
    ranks = Ranks(ORDER, phases=replace(PHASES, monitoring=monitoring), duration_ms=uneven_ms)
    ranks.run(1, LAST_STEP)
    return ranks


@cache
def states_of(n_replicas: int, monitoring: str) -> dict[str, dict[str, Any]]:
    """What a checkpoint holds at each place."""
    phases = replace(PHASES, monitoring=monitoring)
    ranks, states, last = UnevenRanks(ORDER, phases=phases, n_replicas=n_replicas), {}, 0
    for place, stop in PLACES.items():
        ranks.run(last + 1, stop)
        states[place], last = ranks.saved(), stop
    return states


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("monitoring", ["halves", "mixed"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 3), (2, 2)])
def test_more_or_fewer_replicas_freeze_as_if_nothing_had_changed(
    sizes: tuple[int, int], monitoring: str, place: str
) -> None:
    n_before, n_after = sizes
    phases, stop = replace(PHASES, monitoring=monitoring), PLACES[place]
    whole, after = undisturbed(monitoring), UnevenRanks(ORDER, phases=phases, n_replicas=n_after)
    after.load(copy.deepcopy(states_of(n_before, monitoring)[place]))
    after.run(stop + 1, LAST_STEP)
    want = plan_to_json(whole.controllers[0].plan)
    for rank, controller in enumerate(after.controllers):
        assert plan_to_json(controller.plan) == want
        stage = rank % 2
        tail = list(whole.masks(stage, stage))[3 * stop :]
        assert list(after.masks(rank, stage)) == tail
    assert after.collect()[0].average_freeze_ratio == whole.collect()[0].average_freeze_ratio


@pytest.mark.parametrize("place", PLACES)
def test_a_pipeline_of_replicas_goes_on_emulated_and_back(place: str) -> None:
    order, stop = ORDERS["v_shape"], PLACES[place]
    whole = whole_run(Ranks, "v_shape").ranks
    emulated, back = EmulatedRanks(order), Ranks(order, n_replicas=2)
    emulated.controller.load_state_dict(whole_run(Ranks, "v_shape", n_replicas=2).saved(place))
    back.load(emulated.saved())
    for ranks in (emulated, back):
        ranks.run(stop + 1, LAST_STEP)
    want = pytest.approx(list(whole.controllers[0].plan.ratios))
    assert list(emulated.controller.plan.ratios) == want
    assert all(list(each.plan.ratios) == want for each in back.controllers)


def test_as_many_processes_keep_their_own_times() -> None:
    before, after = (UnevenRanks(ORDER, n_replicas=2) for _ in range(2))
    before.run(1, 5)
    state = before.saved()
    assert state["rank_0"] != state["rank_2"], "replicas measured other times"
    after.load(state)
    assert without_stable_times(after.saved()) == without_stable_times(state)


def test_the_slowest_process_counts_for_each_action_by_hand() -> None:
    def state(warm: list[dict[str, float]], spans: list[float], links: list[Any]) -> dict[str, Any]:
        samples = {"upper_bound": {"warm": warm, "cold": [], "spans_ms": spans}}
        return {"applied": [1.0, 2], "planner": {"samples": samples, "p2p_latency_ms": links}}

    one = state([{"0F0": 1.0, "0B0": 9.0}, {"0F0": 2.0, "0B0": 4.0}], [10.0, 6.0], [[0, 1, 5.0]])
    other = state([{"0F0": 3.0, "0B0": 5.0}, {"0F0": 1.0, "0B0": 5.0}], [8.0, 7.0], [[0, 1, 6.0]])
    merged = merge_replicas([one, other])
    # Medians: 0F0 1.5 and 2, 0B0 6.5 and 5. A whole process's times are taken, not the larger ones.
    assert merged["planner"]["samples"]["upper_bound"] == {
        "warm": [{"0F0": 3.0, "0B0": 9.0}, {"0F0": 1.0, "0B0": 4.0}],
        "cold": [],
        "spans_ms": [10.0, 7.0],
    }
    assert merged["planner"]["p2p_latency_ms"] == [[0, 1, 6.0]]
    assert merged["applied"] == [1.0, 2]
    other["planner"]["samples"]["upper_bound"]["warm"].pop()
    with pytest.raises(ValueError, match=r"have measured \[2, 1\] warm batches"):
        merge_replicas([one, other])


# -- what is refused -------------------------------------------------------------------------------


def refused(state: dict[str, Any], order: ScheduleOrder, words: str, n_replicas: int = 1) -> None:
    with pytest.raises(ValueError, match=words):
        Ranks(order, n_replicas=n_replicas).controllers[0].load_state_dict(state)


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_another_pipeline_is_refused(stop: int) -> None:
    ranks = Ranks(ORDER, n_replicas=2)
    ranks.run(1, stop)
    state = ranks.saved()
    words = (
        r"saved by a pipeline of 2 ranks, which hold the stages 0 \| 1; this run has "
        r"a pipeline of size 4; resume .*load the checkpoint without it"
    )
    refused(state, one_f_one_b_order(4, 4), words)


def test_a_pipeline_that_lays_its_stages_otherwise_is_refused() -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, 2)
    words = r"ranks hold the stages 0 \| 1, those of this run 0, 3 \| 1, 2; resume"
    refused(ranks.saved(), hand_order("v_shape"), words)


@pytest.mark.parametrize("n_microbatches", [3, 5])
@pytest.mark.parametrize("stop", [3, 8, 12])
def test_other_microbatches_are_refused(stop: int, n_microbatches: int) -> None:
    ranks = Ranks(ORDER)
    ranks.run(1, stop)
    words = (
        rf"those of 4 microbatches in a batch, this run has {n_microbatches}; .*n_microbatches of "
    )
    refused(ranks.saved(), one_f_one_b_order(2, n_microbatches), words, n_replicas=2)


def test_a_process_that_is_missing_is_told() -> None:
    state = Ranks(ORDER, n_replicas=2).saved()
    del state["rank_1"]
    refused(
        state, ORDER, r"has \['rank_0', 'rank_2', 'rank_3'\], of which .* must be rank_0, rank_1"
    )


def test_all_states_and_no_other_are_asked_for() -> None:
    (controller, _) = Ranks(ORDER).controllers
    keys = ["rank_10", "rank_9", "rank_x", "score.mean.layers.0.weight"]
    assert list(controller.state_to_load(keys)) == ["rank_9", "rank_10"]
    assert list(controller.state_to_load([])) == ["rank_0"], "which is told to be missing"
