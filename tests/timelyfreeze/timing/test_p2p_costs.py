import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.schedule.dag import build_dag, makespan
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, parse_order
from timelyfreeze.timing.bounds import uniform_bounds
from timelyfreeze.timing.processors import message_time, play_batch, receiving, with_messages


def test_actions_that_work_on_what_another_rank_sent_are_told_by_hand() -> None:
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
    names = [str(a) for a, r in zip(dag.actions, receiving(dag), strict=True) if r]
    assert names == ["0B0", "0B1", "1F0", "1F1"]


def test_stages_of_one_rank_send_each_other_nothing_and_weight_passes_receive_nothing() -> None:
    # Folded: stages 1 and 2 lie on rank 1, stages 0 and 3 on rank 0.
    dag = build_dag(parse_order(["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"]))
    names = {str(a) for a, r in zip(dag.actions, receiving(dag), strict=True) if r}
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
    _, batch_ms = play_batch(dag, durations + true_ms * receiving(dag), n_processors)
    found_ms = message_time(dag, durations, batch_ms, n_processors)
    _, again_ms = play_batch(dag, durations + found_ms * receiving(dag), n_processors)
    assert again_ms == pytest.approx(batch_ms, rel=1e-6)
    if n_processors is None:  # the longest path grows strictly with what a message costs
        assert found_ms == pytest.approx(true_ms, rel=1e-4)


def test_messages_lengthen_both_bounds_alike_and_keep_what_freezing_saves() -> None:
    dag = build_dag(one_f_one_b_order(2, 4))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    longer = with_messages(dag, bounds, 0.5)
    receives = receiving(dag)
    assert np.array_equal(longer.max_ms - bounds.max_ms, 0.5 * receives)
    assert np.array_equal(longer.max_ms - longer.min_ms, bounds.max_ms - bounds.min_ms)
    assert makespan(dag, longer.max_ms) > makespan(dag, bounds.max_ms)
