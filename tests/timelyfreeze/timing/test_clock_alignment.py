"""The oracle plays passes on one clock, then hides that clock from the ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import random_order
from timelyfreeze.schedule.dag import build_dag, edge_delays, start_times
from timelyfreeze.schedule.order import Action, ScheduleOrder, parse_action, parse_order
from timelyfreeze.timing.clock_alignment import Intervals, clock_offsets, min_distances

NONE = -np.inf


def played(
    order: ScheduleOrder, seed: int, p2p_latency_ms: dict[tuple[int, int], float]
) -> dict[Action, tuple[float, float]]:
    """Times of all actions on one clock, and nobody waits longer than it has to."""
    dag = build_dag(order)
    durations_ms = np.random.default_rng(seed).uniform(0.5, 5.0, len(dag.actions))
    start = start_times(dag, durations_ms, edge_delays(dag, p2p_latency_ms))
    pairs = zip(start.tolist(), (start + durations_ms).tolist(), strict=True)
    return dict(zip(dag.actions, pairs, strict=True))


def hidden(
    order: ScheduleOrder, times: dict[Action, tuple[float, float]], zeros: list[float]
) -> list[Intervals]:
    """What each rank sees whose clock shows 0 at its entry of ``zeros``."""
    return [
        {a: (times[a][0] - zero, times[a][1] - zero) for a in row}
        for row, zero in zip(order.ranks, zeros, strict=True)
    ]


def random_links(n_ranks: int, seed: int, *, both_ways_alike: bool) -> dict[tuple[int, int], float]:
    rng = np.random.default_rng(seed)
    links = {(a, b): float(rng.uniform(0.0, 2.0)) for a in range(n_ranks) for b in range(n_ranks)}
    if both_ways_alike:
        return {(a, b): links[min(a, b), max(a, b)] for a, b in links}
    return links


def test_two_clocks_lie_where_the_messages_put_them() -> None:
    """0F0 ends at 3 by the one clock, 1F0 begins at 1 by the other: at least 2 apart.

    1B0 ends at 4 and 0B0 begins at 8: at most 4 apart. So 3, the middle.
    """
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    first = {parse_action("0F0"): (0.0, 3.0), parse_action("0B0"): (8.0, 9.0)}
    second = {parse_action("1F0"): (1.0, 2.0), parse_action("1B0"): (2.0, 4.0)}
    least = min_distances(dag, [first, second])
    assert least.tolist() == [[NONE, 2.0], [-4.0, NONE]]
    assert clock_offsets(least).tolist() == [0.0, 3.0]


def test_a_delay_narrows_the_range() -> None:
    """With 1.5 ms on the way there and nothing back, from 3.5 to 4: the middle is 3.75."""
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    first = {parse_action("0F0"): (0.0, 3.0), parse_action("0B0"): (8.0, 9.0)}
    second = {parse_action("1F0"): (1.0, 2.0), parse_action("1B0"): (2.0, 4.0)}
    least = min_distances(dag, [first, second], edge_delays(dag, {(0, 1): 1.5}))
    assert clock_offsets(least).tolist() == [0.0, 3.75]


def test_three_clocks_in_a_row() -> None:
    """Ranges 2 to 4 and 10 to 11; nothing ties the first to the last but the one in between."""
    least = [[NONE, 2.0, NONE], [-4.0, NONE, 10.0], [NONE, -11.0, NONE]]
    assert clock_offsets(least).tolist() == [0.0, 3.0, 13.5]


def test_rules_that_cannot_all_be_kept_give_way_alike() -> None:
    """At least 5 and at most 3: both give way by 1."""
    assert clock_offsets([[NONE, 5.0], [-3.0, NONE]]).tolist() == [0.0, 4.0]


def test_a_contradiction_over_three_clocks_gives_way_by_its_mean() -> None:
    """2 + 2 + 2 round the circle is 6 too much, so each gives way by 2."""
    least = [[NONE, 2.0, NONE], [NONE, NONE, 2.0], [2.0, NONE, NONE]]
    assert clock_offsets(least) == pytest.approx([0.0, 0.0, 0.0])


def test_one_clock_needs_nothing() -> None:
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    seen = {action: (float(i), i + 1.0) for i, action in enumerate(dag.actions)}
    assert clock_offsets(min_distances(dag, [seen])).tolist() == [0.0]


def test_a_clock_that_only_receives_is_refused() -> None:
    with pytest.raises(ValueError, match="process 1 does not both receive from and send"):
        clock_offsets([[NONE, 5.0], [NONE, NONE]])


def test_an_action_that_nobody_saw_is_named() -> None:
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    seen = {a: (0.0, 1.0) for a in dag.actions if str(a) != "1B0"}
    with pytest.raises(ValueError, match=r"1 of 4 actions .* such as 1B0"):
        min_distances(dag, [seen])


@given(seed=st.integers(0, 10**6))
def test_known_links_bring_back_the_clock(seed: int) -> None:
    """Whatever rules are tight, the truth keeps them all, and so does what is found."""
    order = random_order(seed)
    dag = build_dag(order)
    links = random_links(order.n_ranks, seed, both_ways_alike=False)
    times = played(order, seed, links)
    zeros = np.random.default_rng(seed).uniform(-50.0, 50.0, order.n_ranks).tolist()
    least = min_distances(dag, hidden(order, times, zeros), edge_delays(dag, links))
    found = clock_offsets(least)
    distances = found[None, :] - found[:, None]
    assert (distances >= least - 1e-9).all()


@given(seed=st.integers(0, 10**6))
def test_a_chain_of_ranks_that_waits_for_every_message_is_found_exactly(seed: int) -> None:
    """One microbatch: every message is waited for, there and back, and links are alike both ways.

    So the middle is right even where nobody knows the links.
    """
    n_ranks = 2 + seed % 5
    order = parse_order([f"{rank}F0 {rank}B0" for rank in range(n_ranks)])
    links = random_links(n_ranks, seed, both_ways_alike=True)
    times = played(order, seed, links)
    zeros = np.random.default_rng(seed).uniform(-50.0, 50.0, n_ranks)
    least = min_distances(build_dag(order), hidden(order, times, zeros.tolist()))
    assert clock_offsets(least) == pytest.approx((zeros - zeros[0]).tolist())
