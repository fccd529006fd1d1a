"""A first stage that is all or nothing, under a plan with a policy."""

from typing import Any

import numpy as np

from tests.timelyfreeze.helpers.ranks import N_TENSORS, PHASES, Ranks
from tests.timelyfreeze.helpers.stub_policy import StubPolicy
from timelyfreeze.schedule.order import one_f_one_b_order

ORDER = one_f_one_b_order(2, 4)
LAST_MONITOR_STEP = PHASES.last_monitor_step


def planned(frozen: np.ndarray, **options: Any) -> Ranks:
    policy = StubPolicy(lambda check: frozen)
    return Ranks(
        ORDER, policy=policy, first_stage="all_or_nothing", max_freeze_ratio=0.6, **options
    )


def test_a_first_stage_that_is_all_or_nothing_follows_no_scattered_choice() -> None:
    chosen = np.random.default_rng(0).random(2 * N_TENSORS) < 0.5
    chosen[0] = False  # gradients run down to the first tensor
    ranks = planned(chosen)
    plain = Ranks(ORDER, first_stage="all_or_nothing", max_freeze_ratio=0.6)
    for each in (ranks, plain):
        each.run(1, 13)
    assert list(ranks.masks(0, 0)) == list(plain.masks(0, 0))
    drawn = {np.mean(mask) for masks in ranks.masks(0, 0) for mask in masks.values()}
    assert drawn == {1.0}
    assert list(ranks.masks(1, 1)) != list(plain.masks(1, 1))


def test_a_first_stage_that_is_all_or_nothing_follows_a_frozen_front() -> None:
    """With the plan's ratio in the mean: the front, all, or, where it asks for less, nothing."""
    front = np.arange(2 * N_TENSORS) < 5
    ranks = planned(front, skip_input_grads="off")
    ranks.run(1, LAST_MONITOR_STEP + 4)
    planned_masks = list(ranks.masks(0, 0))[3 * LAST_MONITOR_STEP :]
    drawn = {sum(mask) for masks in planned_masks for mask in masks.values()}
    assert 5 in drawn
    assert drawn <= {5, N_TENSORS}
