"""Which example a number stands for, on epochs small enough to deal by hand."""

import numpy as np
import pytest

from torchtitan.data.stream import Dealing, EpochOrder, ExampleStream, in_parts


def test_parts_by_hand() -> None:
    # Part 0 has 10 and 12, part 1 has 11 and 13; 14 is nobody's. The readers of part 1 have the
    # places 0, 2 and 4 here, and so 14 too.
    first, order = np.array([10, 11, 12, 13, 14]), np.array([13, 14, 12, 10, 11])
    assert in_parts(order, first, 2, 1).tolist() == [13, 12, 14, 10, 11]
    # Now those of part 0 have.
    assert in_parts(order, first, 2, 4).tolist() == [14, 13, 12, 11, 10]
    assert in_parts(first, first, 2, 0).tolist() == first.tolist()


def test_a_dealing_is_that_of_the_readers_who_begin() -> None:
    """Of 4 5 7 8 9 10 11 | 12 ... reader 0 takes 4 7 9 11 13 and reader 1 takes 5 8 10 12."""
    stream = ExampleStream(7, (4, 5), (Dealing(0, 3, 0),))
    dealt = stream.in_parts(2, n_examples=6)
    assert dealt.dealings == (Dealing(0, 3, 0), Dealing(2, 2, 1))
    assert [dealt.dealing(epoch).n_parts for epoch in range(4)] == [3, 3, 2, 2]
    assert [(number + 1) % 2 for number in (11, 13, 12, 10)] == [0, 0, 1, 1]
    # The same readers go on: nothing is dealt anew. Others begin in the same epoch: what these had
    # not begun is.
    assert dealt.in_parts(2, 6) == dealt
    assert dealt.in_parts(3, 6).dealings == (Dealing(0, 3, 0), Dealing(2, 3, 1))
    assert dealt.in_parts(1, 6).dealings == (Dealing(0, 3, 0), Dealing(2, 1, 0))
    assert ExampleStream().in_parts(1, 6).dealings == ()


@pytest.mark.parametrize("seed", [None, 5])
def test_numbers_of_two_epochs_in_turn(seed: int | None) -> None:
    order, stream = EpochOrder(np.arange(20, 26), seed), ExampleStream()
    read = [order.index(stream, number) for number in (0, 6, 12, 1, 7, 13, 2, 8, 14, 3, 9, 15)]
    read += [order.index(stream, number) for number in (4, 5, 10, 11, 16, 17)]
    epochs = [read[e:12:3] + read[12 + 2 * e : 14 + 2 * e] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20, 26))] * 3
    if seed is not None:
        generators = [np.random.default_rng([seed, epoch]) for epoch in range(3)]
        assert epochs == [g.permutation(np.arange(20, 26)).tolist() for g in generators]
