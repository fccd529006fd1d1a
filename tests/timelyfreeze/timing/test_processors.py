import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_order, simulate
from timelyfreeze.schedule.dag import build_dag, makespan, start_times
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, parse_order
from timelyfreeze.timing import processors
from timelyfreeze.timing.bounds import uniform_bounds
from timelyfreeze.timing.processors import (
    message_time,
    shared_cores,
    shared_processors,
    simulate_batch,
    usable_cores,
    with_messages,
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
        start, batch_ms = simulate_batch(dag, durations, n_processors)
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
    start, batch_ms = simulate_batch(dag, durations, n_processors)
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
        _, batch_ms = simulate_batch(dag, durations, n_processors)
        assert batch_ms == pytest.approx(durations.sum() / n_processors)


@pytest.mark.parametrize("seed", range(60))
def test_more_processors_never_make_a_batch_longer(seed: int) -> None:
    dag = build_dag(random_order(seed))
    n_ranks = int(dag.ranks.max()) + 1
    durations = random_times(len(dag.actions), seed)
    batches = [simulate_batch(dag, durations, n)[1] for n in np.arange(0.25, n_ranks + 0.3, 0.25)]
    for fewer, more in pairwise(batches):
        assert more <= fewer * (1 + 1e-12)


def test_two_ranks_on_one_and_a_half_processors_by_hand() -> None:
    """Alone a rank runs at full speed; both together each at 3/4.

    0F0 alone until 2. Then 0F1 (3) and 1F0 (6) share: 3 of work take 4, so 0F1 ends at 6 and 1F0
    has 3 left, alone until 9. 1F1 (1) until 10, 1B0 (2) until 12. Then 1B1 (3) and 0B0 (6) share:
    1B1 ends at 16 with 3 of 0B0 left, until 19; 0B1 (1) until 20.
    """
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
    start, batch_ms = simulate_batch(dag, [2.0, 3.0, 6.0, 1.0, 6.0, 1.0, 2.0, 3.0], 1.5)
    #                         0F0  0F1   0B0   0B1  1F0  1F1   1B0   1B1
    assert start.tolist() == [0.0, 2.0, 12.0, 19.0, 2.0, 9.0, 10.0, 12.0]
    assert batch_ms == 20.0


def test_half_a_processor_slows_even_a_lone_rank() -> None:
    dag = build_dag(parse_order(["0F0 0B0"]))
    start, batch_ms = simulate_batch(dag, [1.0, 3.0], 0.5)
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
            simulate_batch(dag, [1.0, -1.0, *[1.0] * 6], n_processors)
        with pytest.raises(ValueError, match=r"durations_ms has shape \(3,\)"):
            simulate_batch(dag, [1.0] * 3, n_processors)


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


def test_actions_that_work_on_what_another_rank_sent_are_told_by_hand() -> None:
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
    names = [str(a) for a, r in zip(dag.actions, dag.receiving, strict=True) if r]
    assert names == ["0B0", "0B1", "1F0", "1F1"]


def test_stages_of_one_rank_send_each_other_nothing_and_weight_passes_receive_nothing() -> None:
    # Folded: stages 1 and 2 lie on rank 1, stages 0 and 3 on rank 0.
    dag = build_dag(parse_order(["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"]))
    names = {str(a) for a, r in zip(dag.actions, dag.receiving, strict=True) if r}
    assert names == {"1F0", "3F0", "2I0", "0I0"}


def test_one_microbatch_over_two_ranks_by_hand() -> None:
    """1 + 1 + 2 + 2 ms of work in a chain that batches two messages; 8 ms were measured."""
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    durations = [2.0 if a.kind.value == "B" else 1.0 for a in dag.actions]
    assert message_time(dag, durations, 8.0) == pytest.approx(1.0, abs=1e-6)


def test_a_batch_that_its_actions_explain_has_free_messages() -> None:
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    assert message_time(dag, [1.0] * 4, 4.0) == 0.0
    assert message_time(dag, [1.0] * 4, 3.5) == 0.0


def test_one_rank_has_no_messages() -> None:
    dag = build_dag(parse_order(["0F0 1F0 1B0 0B0"]))
    assert message_time(dag, [1.0] * 4, 9.0) == 0.0


def test_a_batch_time_that_is_no_number_is_refused() -> None:
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    with pytest.raises(ValueError, match="measured batch time is nan"):
        message_time(dag, [1.0] * 4, float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize("n_processors", [None, 2.0])
@pytest.mark.parametrize(
    "order", [gpipe_order(3, 5), one_f_one_b_order(4, 6)], ids=["GPipe", "1F1B"]
)
@given(true_ms=st.floats(0.01, 5.0), seed=st.integers(0, 2**16))
def test_the_cost_that_made_a_batch_is_found_again(order, n_processors, true_ms, seed) -> None:
    dag = build_dag(order)
    durations = np.random.default_rng(seed).uniform(1.0, 3.0, len(dag.actions))
    _, batch_ms = simulate_batch(dag, durations + true_ms * dag.receiving, n_processors)
    found_ms = message_time(dag, durations, batch_ms, n_processors)
    _, again_ms = simulate_batch(dag, durations + found_ms * dag.receiving, n_processors)
    assert again_ms == pytest.approx(batch_ms, rel=1e-6)
    if n_processors is None:  # the longest path grows strictly with what a message costs
        assert found_ms == pytest.approx(true_ms, rel=1e-4)


def test_messages_lengthen_both_bounds_alike_and_keep_what_freezing_saves() -> None:
    dag = build_dag(one_f_one_b_order(2, 4))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    longer = with_messages(dag, bounds, 0.5)
    receives = dag.receiving
    assert np.array_equal(longer.max_ms - bounds.max_ms, 0.5 * receives)
    assert np.array_equal(longer.max_ms - longer.min_ms, bounds.max_ms - bounds.min_ms)
    assert makespan(dag, longer.max_ms) > makespan(dag, bounds.max_ms)
