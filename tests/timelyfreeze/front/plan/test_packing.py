"""What larger batches are made of, against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.front.plan import (
    BatchPacking,
    last_step,
    performance_packing,
)


@given(accumulations=st.integers(1, 24), max_growth=st.integers(1, 6), room=st.integers(1, 200))
def test_it_is_the_largest_batch_that_there_is_room_for(
    accumulations: int, max_growth: int, room: int
) -> None:
    found = performance_packing(lambda factor: factor <= room, accumulations, max_growth)
    # A worker's batches of a step have as many rows as before, or the total grows.
    assert found.factor * found.accumulations == accumulations * found.growth
    possible = [
        (factor, n, growth)
        for growth in range(1, max_growth + 1)
        for n in range(1, accumulations + 1)
        for factor in range(1, room + 1)
        if factor * n == accumulations * growth and (growth == 1 or n == 1)
    ]
    assert (found.factor, found.accumulations, found.growth) == max(possible, key=lambda p: p[0])


def test_rows_of_a_step_grow_only_once_it_is_down_to_one_batch() -> None:
    found = [performance_packing(lambda f, r=r: f <= r, 6, 3) for r in (1, 2, 5, 6, 11, 12, 18, 99)]
    assert found == [
        BatchPacking(1, 6), BatchPacking(2, 3), BatchPacking(3, 2), BatchPacking(6, 1),
        BatchPacking(6, 1), BatchPacking(12, 1, 2), BatchPacking(18, 1, 3), BatchPacking(18, 1, 3),
    ]  # fmt: skip


def test_what_is_asked_for_is_never_smaller_than_what_has_room() -> None:
    """Without room for 2, nobody asks whether there is some for 4."""
    asked: list[int] = []
    performance_packing(lambda factor: bool(asked.append(factor)), 4, 9)
    assert asked == [2]


@given(n_steps=st.integers(1, 100), growths=st.lists(st.integers(1, 5), min_size=101, max_size=101))
def test_a_run_ends_with_the_rows_that_it_was_to_read(n_steps: int, growths: list[int]) -> None:
    """Played step by step, with another growth in each."""
    step = n_read = 0
    while step < last_step(n_steps, step, n_read, growths[step]):
        growth = growths[step]
        step, n_read = step + 1, n_read + growth
    assert n_steps <= n_read < n_steps + max(growths)


@given(st.integers(2, 100), st.integers(1, 5))
def test_the_last_step_stays_while_the_growth_does(n_steps: int, growth: int) -> None:
    steps = range(n_steps // growth)
    assert len({last_step(n_steps, step, step * growth, growth) for step in steps}) <= 1
