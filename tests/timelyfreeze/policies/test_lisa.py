import math

import numpy as np
import pytest

from tests.timelyfreeze.helpers.toy_model import (
    assert_resumes,
    of_blocks,
    run,
    toy_layout,
)
from timelyfreeze.policies.lisa import Lisa
from timelyfreeze.policies.policy import Check


def live_blocks(policy: Lisa, n_layers: int, n_checks: int, seed: int = 0) -> np.ndarray:
    """Which blocks train, a row for each interval."""
    decisions = run(policy, toy_layout(n_layers), [{}] * n_checks, seed=seed)
    return ~np.array([of_blocks(d.frozen) for d in decisions])


@pytest.mark.parametrize("active_layers", [0, 1, 2, 7, 8])
def test_as_many_blocks_train_as_are_asked_for(active_layers: int) -> None:
    live = live_blocks(Lisa(active_layers=active_layers), n_layers=8, n_checks=30)
    assert live.sum(axis=1).tolist() == [active_layers] * 31


def test_embedding_norm_and_head_always_train() -> None:
    layout = toy_layout(8)
    for decision in run(Lisa(active_layers=0), layout, [{}] * 5):
        live = [name for name, f in zip(layout.names, decision.frozen, strict=True) if not f]
        assert live == ["tok_embeddings.weight", "norm.weight", "output.weight"]


def test_seed_and_check_alone_decide() -> None:
    policy, layout = Lisa(active_layers=3), toy_layout(12)
    a = live_blocks(policy, 12, 40, seed=7)
    assert (a == live_blocks(policy, 12, 40, seed=7)).all()
    other = live_blocks(policy, 12, 40, seed=8)
    assert (a != other).any(axis=1).sum() > 30
    assert (a[1:] != other[:-1]).any(axis=1).sum() > 30, "not the same draws one check later"
    assert (a[1:] != a[:-1]).any(axis=1).sum() > 30, "new blocks in every interval"
    # Entering at check 20 without having seen the others gives what the whole run drew.
    before = policy.start(Check(0, layout, {}, 7))
    late = policy.decide(before, Check(20, layout, {}, 7))
    assert of_blocks(~late.frozen) == a[20].tolist()


def test_each_block_is_drawn_about_equally_often() -> None:
    n_layers, active, n_intervals = 8, 2, 2000
    live = live_blocks(Lisa(active_layers=active), n_layers, n_intervals - 1)
    fraction = active / n_layers
    spread = math.sqrt(n_intervals * fraction * (1 - fraction))
    hits = live.sum(axis=0)
    assert (abs(hits - n_intervals * fraction) < 4.5 * spread).all(), hits
    # Pairs too: 28 of them, so blocks are not drawn in fixed company.
    together = live.T.astype(int) @ live.astype(int)
    pairs = together[np.triu_indices(n_layers, k=1)]
    assert (abs(pairs - n_intervals / 28) < 4.5 * math.sqrt(n_intervals / 28)).all(), pairs


def test_a_resumed_run_decides_the_same() -> None:
    assert_resumes(Lisa(), toy_layout(8), [{}] * 6)


def test_a_model_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lisa\.active_layers is 5; the model has 4"):
        Lisa(active_layers=5).start(Check(0, toy_layout(4), {}, 0))


def test_it_measures_nothing() -> None:
    assert Lisa().measurement is None
