import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_order, simulate
from timelyfreeze.schedule.dag import build_dag, makespan, start_times
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.timing import processors
from timelyfreeze.timing.processors import (
    play_batch,
    shared_cores,
    shared_processors,
    usable_cores,
)

SEEDS = st.integers(0, 10**6)


def random_times(n_actions: int, seed: int) -> np.ndarray:
    """Durations with ties and zeros, which are where a play-through may stumble."""
    rng = np.random.default_rng(seed)
    return rng.choice([0.0, 0.5, 1.0, 2.0, float(rng.uniform(0.1, 5.0))], n_actions)


@given(seed=SEEDS, more=st.sampled_from([0.0, 0.5, 3.0]))
def test_with_a_processor_for_each_rank_a_batch_is_its_longest_path(seed: int, more: float) -> None:
    order = random_order(seed)
    dag = build_dag(order)
    durations = random_times(len(dag.actions), seed)
    times = simulate(order, lambda action: durations[dag.index[action]])
    for n_processors in (None, order.n_ranks + more):
        start, batch_ms = play_batch(dag, durations, n_processors)
        assert start.tolist() == start_times(dag, durations).tolist()
        assert batch_ms == makespan(dag, durations)
        assert batch_ms == pytest.approx(max(end for _, end in times.values()))


@given(seed=SEEDS, fraction=st.floats(0.1, 0.99))
def test_a_shared_batch_is_never_shorter_than_its_longest_path_or_its_work(
    seed: int, fraction: float
) -> None:
    dag = build_dag(random_order(seed))
    n_ranks = int(dag.ranks.max()) + 1
    durations = random_times(len(dag.actions), seed)
    n_processors = fraction * n_ranks
    start, batch_ms = play_batch(dag, durations, n_processors)
    slack = 1e-9 * max(batch_ms, 1.0)
    assert batch_ms >= makespan(dag, durations) - slack
    assert batch_ms >= durations.sum() / n_processors - slack
    # With one rank after the other, nobody ever fractions.
    assert batch_ms <= durations.sum() / min(1.0, n_processors) + slack
    for before, after in dag.edges.tolist():
        assert start[after] >= start[before] + durations[before] - slack


@pytest.mark.parametrize("seed", range(60))
def test_a_shared_processor_never_idles_while_a_rank_is_ready(seed: int) -> None:
    """With one processor or less, the work alone decides."""
    dag = build_dag(random_order(seed))
    durations = random_times(len(dag.actions), seed)
    for n_processors in (0.25, 1.0):
        _, batch_ms = play_batch(dag, durations, n_processors)
        assert batch_ms == pytest.approx(durations.sum() / n_processors)


@pytest.mark.parametrize("seed", range(60))
def test_more_processors_never_make_a_batch_longer(seed: int) -> None:
    dag = build_dag(random_order(seed))
    n_ranks = int(dag.ranks.max()) + 1
    durations = random_times(len(dag.actions), seed)
    batches = [play_batch(dag, durations, n)[1] for n in np.arange(0.25, n_ranks + 0.3, 0.25)]
    for fewer, more in pairwise(batches):
        assert more <= fewer * (1 + 1e-12)


def test_two_ranks_on_one_and_a_half_processors_by_hand() -> None:
    """Alone a rank runs at full speed; both together each at 3/4.

    0F0 alone until 2. Then 0F1 (3) and 1F0 (6) share: 3 of work take 4, so 0F1 ends at 6 and 1F0
    has 3 left, alone until 9. 1F1 (1) until 10, 1B0 (2) until 12. Then 1B1 (3) and 0B0 (6) share:
    1B1 ends at 16 with 3 of 0B0 left, until 19; 0B1 (1) until 20.
    """
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
    start, batch_ms = play_batch(dag, [2.0, 3.0, 6.0, 1.0, 6.0, 1.0, 2.0, 3.0], 1.5)
    #                         0F0  0F1   0B0   0B1  1F0  1F1   1B0   1B1
    assert start.tolist() == [0.0, 2.0, 12.0, 19.0, 2.0, 9.0, 10.0, 12.0]
    assert batch_ms == 20.0


def test_half_a_processor_slows_even_a_lone_rank() -> None:
    dag = build_dag(parse_order(["0F0 0B0"]))
    start, batch_ms = play_batch(dag, [1.0, 3.0], 0.5)
    assert start.tolist() == [0.0, 2.0]
    assert batch_ms == 8.0


def test_processors_are_shared_only_where_ranks_outnumber_them() -> None:
    dag = build_dag(hand_order("v_shape"))  # two ranks with two stages each
    assert shared_processors(dag, None) is None
    assert shared_processors(dag, 2.0) is None
    assert shared_processors(dag, 1.99) == 1.99
    for n_processors in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"n_processors is {n_processors}; it must be above 0"):
            shared_processors(dag, n_processors)


def test_durations_are_checked() -> None:
    dag = build_dag(hand_order("two_by_two"))
    for n_processors in (None, 1.0):
        with pytest.raises(ValueError, match=r"durations_ms of action 0F1 is -1\.0 ms"):
            play_batch(dag, [1.0, -1.0, *[1.0] * 6], n_processors)
        with pytest.raises(ValueError, match=r"durations_ms has shape \(3,\)"):
            play_batch(dag, [1.0] * 3, n_processors)


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"),
    [
        ("max 100000", 8, 8.0),
        ("150000 100000", 8, 1.5),
        ("50000 100000", 8, 0.5),
        ("900000 100000", 8, 8.0),
        (None, 3, 3.0),
    ],
)
def test_usable_cores_are_the_lower_of_affinity_and_quota(
    quota: str | None,
    affinity: int,
    cores: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota + "\n")
    monkeypatch.setattr(processors, "_CGROUP_QUOTA", path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("n_ranks", "n_threads", "shared"),
    [(4, 1, 2.0), (3, 1, 2.0), (2, 1, None), (1, 1, None), (4, 2, None)],
)
def test_cores_are_shared_by_more_ranks_than_cores_with_one_thread_each(
    n_ranks: int, n_threads: int, shared: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "usable_cores", lambda: 2.0)
    assert shared_cores(n_ranks, n_threads) == shared
