"""Whether reading pays, on batches small enough to play through by hand."""

from __future__ import annotations

import pytest

from timelyfreeze.front.caching import CacheUse, use_of_parts
from timelyfreeze.front.caching.verdict import FrontTimes, verdict
from timelyfreeze.schedule import Action, ActionKind, build_dag, gpipe_order

DAG = build_dag(gpipe_order(2, 2))  # two stages, two microbatches
FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.FULL_BACKWARD


def batch(front_ms: float, behind_ms: float, backward_ms: float) -> dict[Action, float]:
    durations = {}
    for microbatch in range(2):
        durations[Action(0, FORWARD, microbatch)] = front_ms
        durations[Action(1, FORWARD, microbatch)] = behind_ms
        durations[Action(0, BACKWARD, microbatch)] = 0.0
        durations[Action(1, BACKWARD, microbatch)] = backward_ms
    return durations


def times(computed: list, entered: list, read_ms: list[float]) -> FrontTimes:
    return FrontTimes(computed, entered, read_ms)


@pytest.mark.parametrize(("read_ms", "pays"), [(2.9, True), (3.1, False)])
def test_a_batch_saves_what_it_is_shorter_by(read_ms: float, pays: bool) -> None:
    """Computed: 3 for the first forward of the front, then 4 forwards and backwards of 5 and 10.

    The second forward of the front runs beside the stage behind it, so it saves nothing.
    """
    cold = batch(100.0, 100.0, 100.0)
    mine = times([cold, batch(3, 5, 10)], [cold, batch(0, 5, 10)], [read_ms])
    found = verdict(DAG, [mine.summary()], 1)
    assert found is not None
    assert found.saved_ms == pytest.approx((3 + 2 * 5 + 2 * 10) - (2 * 5 + 2 * 10))
    assert found.read_ms == read_ms
    assert found.pays is pays


def test_ranks_put_their_actions_together() -> None:
    def of_stage(stage: int, times_ms: dict[Action, float]) -> dict[Action, float]:
        return {action: ms for action, ms in times_ms.items() if action.stage == stage}

    ranks = []
    for stage in range(2):
        computed = [of_stage(stage, batch(3, 5, 10))] * 2
        entered = [of_stage(stage, batch(0, 4, 10))] * 2
        ranks.append(times(computed, entered, [2.0, 1.0, 9.0] if stage else []).summary())
    found = verdict(DAG, ranks, 1)
    assert found is not None
    assert found.saved_ms == pytest.approx(3 + 2 * 1)
    assert found.read_ms == 2.0


@pytest.mark.parametrize("slow_first", [True, False])
def test_of_replicas_the_slowest_one_counts(slow_first: bool) -> None:
    slow = times([batch(4, 5, 10)] * 2, [batch(1, 5, 10)] * 2, [2.5, 2.5])
    fast = times([batch(3, 5, 10)] * 2, [batch(0, 5, 10)] * 2, [2.0, 2.0])
    ranks = [slow.summary(), fast.summary()]
    found = verdict(DAG, ranks if slow_first else ranks[::-1], 1)
    assert found is not None
    assert found.saved_ms == pytest.approx(4 - 1)
    assert found.read_ms == 2.5


def test_one_slow_batch_does_not_count() -> None:
    computed = [batch(3, 5, 10)] * 3 + [batch(300, 5, 10)]
    mine = times(computed, [batch(0, 5, 10)] * 2, [1.0, 1.0])
    found = verdict(DAG, [mine.summary()], 1)
    assert found is not None
    assert found.saved_ms == pytest.approx(3)


def test_a_machine_that_was_busy_while_batches_were_read_does_not_count() -> None:
    mine = times([batch(3, 5, 10)] * 2, [batch(0, 50, 100)] * 2, [1.0, 1.0])
    found = verdict(DAG, [mine.summary()], 0)
    assert found is not None
    assert found.saved_ms == pytest.approx(3)


def test_nothing_is_said_of_what_was_not_measured() -> None:
    whole = [batch(3, 5, 10)] * 2
    part = [{Action(0, FORWARD, 0): 1.0}] * 2
    for mine in (times(whole, part, [1.0, 1.0]), times(part, whole, [1.0, 1.0])):
        assert verdict(DAG, [mine.summary()], 1) is None
    assert verdict(DAG, [times(whole, whole, []).summary()], 1) is None


def test_counts_add_up_and_what_is_kept_is_what_is_kept_now() -> None:
    former = CacheUse(10, 4, 300, 200, 5.0, 80.0, 3)
    latest = CacheUse(6, 2, 50, 0, 1.5, 20.0, 4)
    assert use_of_parts(former, latest) == CacheUse(16, 6, 50, 0, 6.5, 100.0, 7)


@pytest.mark.parametrize(
    ("former_ms", "latest_ms", "saved_ms"), [(None, 2.0, 2.0), (2.0, None, 2.0), (None, None, None)]
)
def test_what_is_known_of_a_saving_counts(
    former_ms: float | None, latest_ms: float | None, saved_ms: float | None
) -> None:
    parts = [CacheUse(1, 1, 0, 0, 0.0, saved) for saved in (former_ms, latest_ms)]
    together = use_of_parts(*parts)
    assert together is not None
    assert together.saved_ms == saved_ms


def test_a_part_alone() -> None:
    part = CacheUse(1, 1, 0, 0, 0.0, None)
    assert use_of_parts(None, part) == use_of_parts(part, None) == part
    assert use_of_parts(None, None) is None
