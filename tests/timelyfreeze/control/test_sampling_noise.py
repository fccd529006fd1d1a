"""What sampling adds is measured again while training goes on, and caps follow it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.timelyfreeze.helpers.moving_times import EXACT, ORDER, messages
from tests.timelyfreeze.helpers.ranks import Ranks, without_stable_times
from timelyfreeze.planning.progress import MEASURED_RATIOS

TOKENS = {**EXACT, "unit": "tokens", "max_freeze_ratio": "auto", "min_gain": -1.0}
# Steps after which times are compared; each step has 3 batches.
CHECKS = (12, 16)


def tokens(noise: float, **more: Any) -> Ranks:
    ranks = Ranks(ORDER, **{**TOKENS, **more})
    make_noisy(ranks, noise)
    return ranks


def make_noisy(ranks: Ranks, noise: float) -> None:
    for stages in ranks.stages:
        for stage in stages.values():
            stage.curve = tuple(noise * r**2 for r in MEASURED_RATIOS)


def highest(ranks: Ranks) -> float:
    plans = [controller.plan for controller in ranks.controllers]
    assert plans[0] is not None
    assert all((plan.ratios == plans[0].ratios).all() for plan in plans if plan is not None)
    return float(plans[0].ratios.max())


@pytest.mark.parametrize(("before", "after"), [(0.02, 3.0), (3.0, 0.02)])
def test_the_cap_follows_the_noise(
    before: float, after: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks = tokens(before)
    ranks.run(1, 9)
    first = highest(ranks)
    make_noisy(ranks, after)
    ranks.run(10, 12)
    assert [len(solved) for solved in ranks.solved] == [2, 2]
    assert (highest(ranks) < first) == (before < after)
    # As if that noise had been measured in the warm-up.
    fresh = tokens(after)
    fresh.run(1, 9)
    assert highest(ranks) == pytest.approx(highest(fresh))
    assert messages(caplog, "Times and noise have moved")
    caplog.clear()
    ranks.run(13, 16)
    assert not messages(caplog, "have moved"), "what has moved once is known"


def test_noise_that_stays_asks_for_no_other_plan() -> None:
    ranks = tokens(0.5)
    ranks.run(1, 16)
    assert [len(solved) for solved in ranks.solved] == [1, 1]


def test_a_batch_of_each_step_of_comparison_is_exact_and_measures() -> None:
    ranks = tokens(0.5)
    ranks.run(1, 17)
    for rank, stages in enumerate(ranks.stages):
        stage = stages[rank]
        exact = [3 * (step - 1) for step in (2, *CHECKS)]
        assert [i for i, measures in enumerate(stage.measured) if measures] == exact
        for i in exact:
            assert stage.sampled[i] == {}
            assert i < 3 * 6 or stage.sampled[i + 1]


def test_where_the_user_sets_the_cap_nothing_is_measured_again() -> None:
    ranks = tokens(0.5, max_freeze_ratio=0.3)
    ranks.run(1, 17)
    assert [sum(stage.measured) for stage in (ranks.stages[0][0], ranks.stages[1][1])] == [1, 1]


def test_a_resumed_run_measures_and_plans_alike() -> None:
    whole, stopped, resumed = (tokens(0.02) for _ in range(3))
    for ranks in (whole, stopped):
        ranks.run(1, 10)
    resumed.load(stopped.saved())
    for ranks in (whole, resumed):
        make_noisy(ranks, 3.0)
        ranks.run(11, 17)
        assert len(ranks.solved[0]) == 2
    assert highest(resumed) == highest(whole)
    assert without_stable_times(resumed.saved()) == without_stable_times(whole.saved())
    for rank in (0, 1):
        assert whole.stages[rank][rank].sampled[3 * 10 :] == resumed.stages[rank][rank].sampled
