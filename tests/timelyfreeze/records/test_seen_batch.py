"""Batches as several processes saw them, put together to what was drawn on paper."""

import pytest

from tests.timelyfreeze.records.test_timeline import TWO, critical, interval
from timelyfreeze.records.seen_batch import SeenBatch, measured_timeline
from timelyfreeze.records.timeline import MEASURED
from timelyfreeze.schedule.order import parse_action, parse_order
from timelyfreeze.settings.phases import Phase


def seen(first_ms: float, **intervals: tuple[float, float]) -> SeenBatch:
    """What a process saw whose clock shows 0 ``first_ms`` after the batch began."""
    times = {
        parse_action(name.strip("_")): (start - first_ms, end - first_ms)
        for name, (start, end) in intervals.items()
    }
    fractions = {action: 0.25 for action in times if action.kind.freezable}
    return SeenBatch(times, fractions)


def two_processes() -> list[SeenBatch]:
    """Messages take half a millisecond both ways; the last action is rank 1's own."""
    return [
        seen(0.0, _0F0=(0, 1), _0F1=(1, 2), _0B0=(5, 7), _0B1=(9, 11)),
        seen(1.5, _1F0=(1.5, 2.5), _1B0=(2.5, 4.5), _1F1=(4.5, 5.5), _1B1=(5.5, 8.5)),
    ]


def test_a_measured_pass_has_one_clock_again() -> None:
    timeline = measured_timeline(TWO, two_processes(), Phase.STABLE, step=7)
    assert (timeline.origin, timeline.phase, timeline.step) == (MEASURED, Phase.STABLE, 7)
    assert interval(timeline, "0B0") == pytest.approx((5.0, 7.0))
    assert interval(timeline, "1B1") == pytest.approx((5.5, 8.5))
    assert timeline.batch_ms == pytest.approx(11.0)
    assert critical(timeline) == {"0F0", "1F0", "1B0", "1F1", "1B1", "0B1"}
    assert {str(b.action) for b in timeline.blocks if b.freeze_ratio == 0.25} == {
        "0B0", "0B1", "1B0", "1B1",
    }  # fmt: skip


def test_what_ended_last_is_what_was_waited_for() -> None:
    """0B1 begins after 0B0 here, which has taken longer than 1B1."""
    processes = two_processes()
    processes[0] = seen(0.0, _0F0=(0, 1), _0F1=(1, 2), _0B0=(5, 9.5), _0B1=(9.5, 11))
    timeline = measured_timeline(TWO, processes, Phase.STABLE)
    assert critical(timeline) == {"0F0", "1F0", "1B0", "0B0", "0B1"}


def test_of_replicas_the_first_counts() -> None:
    first, second = two_processes()
    slower = seen(0.0, _0F0=(0, 2), _0F1=(2, 4), _0B0=(5, 7), _0B1=(9, 11))
    together = measured_timeline(TWO, [first, slower, second, second], Phase.STABLE)
    assert together == measured_timeline(TWO, [first, second], Phase.STABLE)


def test_blocks_come_in_the_order_that_ran() -> None:
    declared = parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])
    timeline = measured_timeline(declared, two_processes(), Phase.STABLE)
    assert timeline.order == TWO
    names = [
        (str(timeline.blocks[i].action), str(timeline.blocks[j].action)) for i, j in timeline.edges
    ]
    assert ("1B0", "1F1") in names
    assert ("1F0", "1F1") not in names


def test_a_pass_with_a_hole_is_refused() -> None:
    first, second = two_processes()
    times = {a: t for a, t in second.intervals_ms.items() if str(a) != "1B1"}
    with pytest.raises(ValueError, match="1I1 is missing"):
        measured_timeline(TWO, [first, SeenBatch(times, {})], Phase.STABLE)


THREE = parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"])
PASSED = {"_0F0": (0.0, 0.25), "_0F1": (0.25, 0.5), "_0B0": (0.5, 0.75), "_0B1": (0.75, 1.0)}
RAN = {
    "1F0": (0, 1), "1F1": (1, 2), "1B0": (5, 7), "1B1": (8, 10),
    "2F0": (1.5, 2.5), "2B0": (2.5, 4.5), "2F1": (4.5, 5.5), "2B1": (5.5, 7.5),
}  # fmt: skip


@pytest.mark.parametrize("passed_since_ms", [-70.0, 0.0, 300.0])
def test_a_rank_that_a_batch_passes_by_does_not_set_the_clocks(passed_since_ms: float) -> None:
    """Rank 0 is through at once, whenever that was. The others exchange messages of 0.5 ms."""
    processes = [
        seen(passed_since_ms, **PASSED),
        seen(0.0, **{f"_{name}": RAN[name] for name in RAN if name[0] == "1"}),
        seen(1.5, **{f"_{name}": RAN[name] for name in RAN if name[0] == "2"}),
    ]
    timeline = measured_timeline(THREE, processes, Phase.STABLE, step=7, entry_stage=1)
    assert (timeline.entry_stage, timeline.step) == (1, 7)
    for name, times in RAN.items():
        assert interval(timeline, name) == pytest.approx(times)
    assert {interval(timeline, f"0{name}") for name in ("F0", "F1", "B0", "B1")} == {(0.0, 0.0)}
    assert timeline.batch_ms == pytest.approx(10.0)
    assert timeline.rank_bubbles == pytest.approx((1.0, 0.4, 0.4))
    assert critical(timeline) == {"1F0", "2F0", "2B0", "2F1", "2B1", "1B1"}


def test_what_a_batch_passed_by_has_sent_nothing_that_would_set_the_clocks() -> None:
    """Two ranks of two stages. Rank 1 is 5 ms early, and waits for nothing but stage 2."""
    order = parse_order(["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"])
    ran = {f"_{int(name[0]) + 1}{name[1:]}": times for name, times in RAN.items()}
    passed = {
        "_0F0": (-0.5, -0.25), "_0F1": (-0.25, 0.0), "_0B0": (10.0, 10.5), "_0B1": (10.5, 11.0),
        "_1F0": (-5.0, -4.5), "_1F1": (-4.5, -4.0), "_1B0": (7.5, 8.0), "_1B1": (8.0, 8.5),
    }  # fmt: skip
    processes = [
        seen(first_ms, **{name: (ran | passed)[name] for name in ran | passed if name[1] in held})
        for first_ms, held in ((0.0, "02"), (-5.0, "13"))
    ]
    timeline = measured_timeline(order, processes, Phase.STABLE, entry_stage=2)
    for name, times in ran.items():
        assert interval(timeline, name.strip("_")) == pytest.approx(times)
    assert critical(timeline) == {"2F0", "3F0", "3B0", "3F1", "3B1", "2B1"}


def test_a_passed_stage_of_a_rank_that_computes_takes_no_time() -> None:
    """An emulation of two ranks with two stages each; the batch begins at stage 2, at 0.5 ms."""
    order = parse_order(["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"])
    passed = {
        "0F0": (0, 0.1), "0F1": (0.1, 0.2), "1F0": (0.2, 0.3), "1F1": (0.3, 0.5),
        "1B0": (9.5, 9.6), "1B1": (9.6, 9.7), "0B0": (9.7, 9.8), "0B1": (9.8, 9.9),
    }  # fmt: skip
    ran = {
        "2F0": (0, 1), "2F1": (1, 2), "2B0": (4, 6), "2B1": (7, 9),
        "3F0": (1, 2), "3B0": (2, 4), "3F1": (4, 5), "3B1": (5, 7),
    }  # fmt: skip
    times = passed | {name: (start + 0.5, end + 0.5) for name, (start, end) in ran.items()}
    batch = SeenBatch({parse_action(name): interval for name, interval in times.items()}, {})
    timeline = measured_timeline(order, [batch], Phase.STABLE, entry_stage=2)
    for name, expected in ran.items():
        assert interval(timeline, name) == pytest.approx(expected)
    assert interval(timeline, "0F1") == interval(timeline, "1F1") == (0.0, 0.0)
    assert interval(timeline, "0B0") == interval(timeline, "0B1") == (9.0, 9.0)
    assert interval(timeline, "1B1") == (7.0, 7.0)
    assert timeline.batch_ms == 9.0
    assert critical(timeline) == {"2F0", "3F0", "3B0", "3F1", "3B1", "2B1"}
