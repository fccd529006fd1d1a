"""SmartPipe's formulas, Eq. 5 to 10 as printed, beside batches in a row that are played, F = B = 1.

Notation: s stages on s devices, m microbatches of an iteration, I iterations, f frozen stages in
front.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from timelyfreeze.front.plan.run_ahead import run_ahead
from timelyfreeze.schedule.order import ScheduleOrder, gpipe_order, one_f_one_b_order


def iteration_time(m: int, s: int) -> int:
    """Eq. 5: time of an iteration without freezing."""
    return 2 * (m + s - 1)


def bubble_fraction(m: int, s: int) -> float:
    """Eq. 6: fraction of it in which devices wait."""
    return 1.0 - m / (m + s - 1)


def gpipe_saved_time(f: int, iterations: int) -> int:
    """Eq. 7: what freezing saves of all iterations under GPipe."""
    return f * (2 * iterations - 1)


def one_f_one_b_saved_time(f: int, iterations: int) -> int:
    """Eq. 8: the same under 1F1B."""
    return f * iterations


def gpipe_bubbles(s: int, f: int, iterations: int) -> int:
    """Eq. 9: idle slots of live devices under GPipe."""
    return (s - f) * (iterations + 1) * (s - 2)


def one_f_one_b_bubbles(s: int, f: int, iterations: int) -> int:
    """Eq. 10: the same under 1F1B."""
    return (s - f) * iterations


class Played(NamedTuple):
    """Slots of some iterations: until the end, and idle ones of all stages and of live ones."""

    time: float
    idle: float
    idle_live: float


def play(make: Callable[[int, int], ScheduleOrder], s: int, m: int, i: int, f: int) -> Played:
    batches = run_ahead(make(s, m), f, i)
    actions = batches.dag.actions
    time = batches.batch_ends_ms(np.ones(len(actions)))[-1]
    n_live = sum(action.stage >= f for action in actions)
    return Played(time, s * time - len(actions), (s - f) * time - n_live)


# s, m, I, f, and what is saved under both schedules, and idle slots of live stages.
TABLE = [
    (4, 3, 2, 2, 6, 12),  # Fig. 4a, data size 6
    (4, 6, 1, 2, 2, 8),  # Fig. 4b, 5b
    (4, 4, 2, 2, 6, 12),
    (4, 8, 4, 1, 7, 51),
    (4, 8, 4, 3, 21, 3),
    (8, 8, 4, 2, 14, 252),
    (8, 16, 4, 4, 28, 112),
]


# 1F1B needs as many microbatches as stages.
CASES = [
    (make, *row)
    for make in (gpipe_order, one_f_one_b_order)
    for row in TABLE
    if make is gpipe_order or row[1] >= row[0]
]


@pytest.mark.parametrize(("make", "s", "m", "i", "f", "saved", "idle"), CASES)
def test_what_is_played(
    make: Callable[[int, int], ScheduleOrder],
    s: int, m: int, i: int, f: int, saved: int, idle: int,
) -> None:  # fmt: skip
    unfrozen, frozen = play(make, s, m, i, 0), play(make, s, m, i, f)
    # Eq. 5 and 6 hold for both schedules.
    assert unfrozen.time == i * iteration_time(m, s)
    assert unfrozen.idle / (s * unfrozen.time) == pytest.approx(bubble_fraction(m, s))
    assert unfrozen.time - frozen.time == saved
    assert frozen.idle_live == idle
    # Eq. 7 holds, and for 1F1B too where a step ends before the next begins; Eq. 8 only for I = 1.
    assert saved == gpipe_saved_time(f, i)
    assert (saved == one_f_one_b_saved_time(f, i)) == (i == 1)


@pytest.mark.parametrize("make", [gpipe_order, one_f_one_b_order])
def test_where_eq_9_and_10_hold(make: Callable[[int, int], ScheduleOrder]) -> None:
    """Eq. 9 with two frozen stages: of four, or for one iteration. Eq. 10 with one live stage."""
    right_9, right_10 = set(), set()
    for s, f, i in itertools.product(range(2, 9), range(1, 8), range(1, 6)):
        if f < s:
            idle = play(make, s, s + 1, i, f).idle_live
            right_9 |= {(s, f, i)} if idle == gpipe_bubbles(s, f, i) else set()
            right_10 |= {(s, f, i)} if idle == one_f_one_b_bubbles(s, f, i) else set()
    assert right_9 == {
        *((4, 2, i) for i in range(1, 6)), *((s, 2, 1) for s in range(3, 9)), (7, 3, 2),
    }  # fmt: skip
    assert right_10 == {(f + 1, f, f) for f in range(1, 6)}


def test_eq_9_and_10_beside_the_papers_figures() -> None:
    # Fig. 4: 24 slots become 18, 18 become 16. Bubbles are printed as 13 and 9.
    for (m, i), time, bubbles in (((3, 2), 18, 13), ((6, 1), 16, 9)):
        played = play(gpipe_order, 4, m, i, 2)
        assert played.time == time
        assert gpipe_bubbles(4, 2, i) == bubbles - 1
        # The one that is missing: the second frozen stage waits for its first message.
        assert played.idle_live + 1 == bubbles
    # Fig. 5 prints 10 and 9.
    assert [one_f_one_b_bubbles(4, 2, i) for i in (2, 1)] == [4, 2]


def test_eq_7_needs_a_front_that_keeps_up() -> None:
    # Nine frozen stages and one microbatch: one batch ahead does not hide the chain.
    saved = play(gpipe_order, 10, 1, 4, 0).time - play(gpipe_order, 10, 1, 4, 9).time
    assert saved < gpipe_saved_time(9, 4)
