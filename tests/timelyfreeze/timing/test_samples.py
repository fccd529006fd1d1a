import json
import random
import statistics

import pytest

from tests.timelyfreeze.helpers.pipelines import TWO_BY_TWO, hand_order, random_order
from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.schedule.order import (
    Action,
    ScheduleError,
    ScheduleOrder,
    parse_action,
    parse_order,
)
from timelyfreeze.timing.monitoring import (
    BatchRecord,
    Samples,
    executed_order,
    median_of_each,
    slowest_replica,
)

F0, B0, F1 = map(parse_action, ("0F0", "0B0", "0F1"))


def passed(**durations_ms: float) -> BatchRecord:
    return BatchRecord({parse_action(k[1:]): ms for k, ms in durations_ms.items()}, span_ms=99.0)


def test_cold_passes_do_not_count_beside_warm_ones() -> None:
    samples = Samples()
    samples.add(passed(a0F0=100.0, a0B0=200.0), is_cold=True)
    samples.add(passed(a0F0=1.0, a0B0=2.0), is_cold=False)
    samples.add(passed(a0F0=3.0, a0B0=4.0), is_cold=False)
    assert samples.per_action() == {F0: [1.0, 3.0], B0: [2.0, 4.0]}


def test_cold_passes_are_better_than_none() -> None:
    samples = Samples()
    samples.add(passed(a0F0=100.0), is_cold=True)
    assert samples.per_action() == {F0: [100.0]}
    assert Samples().per_action() == {}


def test_plain_form_survives_json_with_the_order_of_execution() -> None:
    samples = Samples()
    samples.add(passed(a0F1=0.1, a0F0=1 / 3, a0B0=2.5), is_cold=False)
    samples.add(passed(a0B0=7.0), is_cold=True)
    again = read_dataclass(Samples, json.loads(json.dumps(to_plain(samples))))
    assert again == samples
    assert list(again.warm[0]) == [F1, F0, B0]


def test_the_slowest_replica_is_told_by_its_median() -> None:
    fast_with_an_outlier = {F0: [1.0, 1.0, 90.0], B0: [5.0]}
    slow = {F0: [2.0, 2.0, 2.0]}
    other_stage = {F1: [0.0]}
    for ranks in ([fast_with_an_outlier, slow, other_stage], [slow, other_stage]):
        merged = slowest_replica(ranks)
        assert merged[F0] == [2.0, 2.0, 2.0]
        assert merged[F1] == [0.0]
    assert slowest_replica([slow, fast_with_an_outlier])[B0] == [5.0]
    assert slowest_replica([]) == {}


def as_times(order: ScheduleOrder, shuffled: list[list[Action]]) -> list[dict[Action, list[float]]]:
    return [{action: [1.0] for action in row} for row in shuffled]


@pytest.mark.parametrize("seed", range(30))
def test_what_was_executed_is_found_whatever_order_processes_come_in(seed: int) -> None:
    executed = random_order(seed)
    # A declaration with the same actions on the same ranks, but each rank's sorted by kind.
    letters = "FBIW"
    declared = ScheduleOrder(
        tuple(
            tuple(sorted(row, key=lambda a: (letters.index(a.kind.value), a.stage, a.microbatch)))
            for row in executed.ranks
        )
    )
    processes = [list(row) for row in executed.ranks] * 2  # two replicas
    random.Random(seed).shuffle(processes)
    assert executed_order(as_times(executed, processes), declared) == executed


def test_an_incomplete_pipeline_is_refused() -> None:
    declared = parse_order(TWO_BY_TWO)
    whole = as_times(declared, [list(row) for row in declared.ranks])
    with pytest.raises(ScheduleError, match="rank 1 has no actions"):
        executed_order([whole[0], {}], declared)
    del whole[1][parse_action("1F1")]
    with pytest.raises(ScheduleError, match="action 1F1 is missing"):
        executed_order(whole, declared)


@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_holds_several_ranks_has_run_them_all(seed: int) -> None:
    """An emulated pipeline: ranks take turns in any way, each in its own order."""
    order = hand_order("v_shape")
    rows, together = [list(row) for row in order.ranks], []
    rng = random.Random(seed)
    while any(rows):
        row = rng.choice([row for row in rows if row])
        together.append(row.pop(0))
    (times,) = as_times(order, [together])
    assert executed_order([times], order) == order


def test_medians_are_those_of_each_action() -> None:
    records = [passed(a0F0=1.0, a0B0=2.0), passed(a0F0=9.0), passed(a0F0=4.0, a0B0=5.0)]
    medians = median_of_each([record.durations_ms for record in records])
    assert medians == {F0: statistics.median([1, 9, 4]), B0: statistics.median([2, 5])}
    assert median_of_each([]) == {}


def test_hand_orders_are_found_as_they_are() -> None:
    for name in ("interleaved", "v_shape"):
        order = hand_order(name)
        assert executed_order(as_times(order, list(map(list, order.ranks))), order) == order
