"""Clocks that misread, jump or stand still, and a rank that is slow: training goes on.

Times that cannot be are told once and used for nothing; none is clamped.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from tests.timelyfreeze.helpers.ranks import PHASES, Ranks, linear_ms, warnings
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.schedule.order import Action, one_f_one_b_order, parse_action
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.batches import misreading
from timelyfreeze.timing.monitoring import BatchRecord

ORDER = one_f_one_b_order(2, 4)
BAD = [math.nan, math.inf, -math.inf, -1.0]
ACTION = parse_action("1B2")
RANK = 1
# What stays of the run: ramp 7-10, then stable; times are compared at 14, 18, ...
LOOKS = {"replan_every": 4}


class Misreading:
    """Changes what rank 1's recorder hands out, as long as it is switched on."""

    def __init__(self, ranks: Ranks, *, every: bool = False) -> None:
        recorder = ranks.controllers[RANK]._recorder
        self._real_drain = recorder.drain
        self._every = every
        self.durations_ms: dict[Action, float | None] = {}
        self.span_ms: float | None = None
        recorder.drain = self._drain  # type: ignore[method-assign]

    def _drain(self) -> list[BatchRecord]:
        records = self._real_drain()
        n_bad = len(records) if self._every else 1
        # The last ones, since the first of a phase do not count.
        return [*records[: len(records) - n_bad], *map(self._spoilt, records[-n_bad:])]

    def _spoilt(self, record: BatchRecord) -> BatchRecord:
        times = {
            action: self.durations_ms.get(action, time_ms)
            for action, time_ms in record.durations_ms.items()
        }
        known = {action: time_ms for action, time_ms in times.items() if time_ms is not None}
        return replace(
            record,
            durations_ms=known,
            span_ms=record.span_ms if self.span_ms is None else self.span_ms,
        )

    def off(self) -> None:
        self.durations_ms, self.span_ms = {}, None


def assert_trains_unfrozen(ranks: Ranks) -> None:
    for rank, stages in enumerate(ranks.stages):
        assert ranks.controllers[rank].plan is None
        for stage in stages:
            assert list(ranks.masks(rank, stage))[3 * PHASES.last_monitor_step :] == [{}] * 18


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("half", [3, 5])
def test_a_bad_time_while_monitoring_means_no_plan_and_one_warning(
    value: float, half: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(ORDER, **LOOKS)
    bad = Misreading(ranks)
    ranks.run(1, half)
    bad.durations_ms = {ACTION: value}
    ranks.run(half + 1, half + 1)
    bad.off()
    metrics = ranks.collect()
    assert metrics[0].batch_ms == {}, "nothing is made up of it"
    ranks.run(half + 2, 12)
    (message,) = warnings(caplog)
    assert message.startswith("Nothing is frozen: step 7")
    assert f"action {ACTION} has a" in message
    assert f"sample of {value} ms" in message
    assert_trains_unfrozen(ranks)
    assert set(ranks.collect()[0].batch_ms) >= {Phase.RAMP, Phase.STABLE}


def test_an_action_that_was_never_seen_means_no_plan_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(ORDER)
    Misreading(ranks, every=True).durations_ms = {ACTION: None}
    ranks.run(1, 12)
    (message,) = warnings(caplog)
    assert message.startswith("Nothing is frozen: step 7")
    assert_trains_unfrozen(ranks)


def test_a_clock_that_stands_still_means_no_plan_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(ORDER, duration_ms=lambda action, fraction: 0.0, **LOOKS)
    ranks.run(1, 12)
    (message,) = warnings(caplog)
    assert "Nothing is frozen" in message
    assert "0 ms" in message
    assert_trains_unfrozen(ranks)


def test_a_zero_among_times_is_a_time(caplog: pytest.LogCaptureFixture) -> None:
    """An action may be too short for a clock; a median counts it like any other."""
    ranks, undisturbed = Ranks(ORDER), Ranks(ORDER)
    bad = Misreading(ranks)
    bad.durations_ms = {ACTION: 0.0}
    ranks.run(1, 12)
    undisturbed.run(1, 12)
    assert not warnings(caplog)
    left, right = ranks.controllers[0].plan, undisturbed.controllers[0].plan
    assert left is not None
    assert right is not None
    assert left.batch_ms == pytest.approx(right.batch_ms, rel=0.1)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("what", ["action", "span"])
def test_a_bad_time_later_leaves_the_plan_in_force_with_one_warning(
    value: float, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(ORDER, **LOOKS)
    bad = Misreading(ranks)
    ranks.run(1, 12)
    plan = ranks.controllers[0].plan
    assert plan is not None
    ranks.collect()
    if what == "action":
        bad.durations_ms = {ACTION: value}
    else:
        bad.span_ms = value
    ranks.run(13, 14)  # looks at times in the end
    assert ranks.collect()[0].batch_ms == {}
    bad.off()
    ranks.run(15, 18)
    (message,) = warnings(caplog)
    assert message.startswith(f"Rank {RANK}: a clock misread in step 14: ")
    assert f"took {value:g} ms" in message
    assert {plan_to_json(c.plan) for c in ranks.controllers if c.plan} == {plan_to_json(plan)}
    assert ranks.controllers[0].active_plan.switched_off is None
    assert list(ranks.masks(1, 1))[-1] != {}
    assert ranks.collect()[0].batch_ms[Phase.STABLE]


@pytest.mark.parametrize("step", [4, 6])
def test_a_clock_that_jumps_by_an_hour_changes_no_plan(
    step: int, caplog: pytest.LogCaptureFixture
) -> None:
    jumped, undisturbed = Ranks(ORDER), Ranks(ORDER)
    jumped.run(1, step - 1)
    bad = Misreading(jumped)
    bad.durations_ms, bad.span_ms = {ACTION: 3.6e6}, 3.6e6
    jumped.run(step, step)
    bad.off()
    jumped.run(step + 1, 8)
    undisturbed.run(1, 8)
    left, right = jumped.controllers[0].plan, undisturbed.controllers[0].plan
    assert left is not None
    assert right is not None
    assert left.ratios == pytest.approx(right.ratios, abs=1e-9)
    told = [message for message in warnings(caplog) if "does not pay" not in message]
    assert len(told) == 1
    assert "times as long as its actions: a rank was held up" in told[0]


def test_a_rank_that_is_ten_times_slower_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """From the start, and from some step on; both come to the same plan."""
    drift = {1: 10.0}

    def slow_ms(action: Action, fraction: float) -> float:
        return linear_ms(action, fraction) * drift.get(action.stage, 1.0)

    settings = {"replan_every": 4, "batches_per_step": 6, "skip_input_grads": "off"}
    always = Ranks(ORDER, duration_ms=slow_ms, **settings)
    always.run(1, 12)
    drift.clear()
    later = Ranks(ORDER, duration_ms=slow_ms, **settings)
    later.run(1, 14)
    before = later.controllers[0].plan
    assert before is not None
    drift[1] = 10.0
    later.run(15, 18)
    plans = [ranks.controllers[0].plan for ranks in (always, later)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].unfrozen_batch_ms > 8.0 * before.unfrozen_batch_ms
    assert plans[1].batch_ms == pytest.approx(plans[0].batch_ms, rel=0.05)
    assert not warnings(caplog)


def test_without_highspy_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("timelyfreeze.planning.simplex", "timelyfreeze.planning.skip_program"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "highspy", None)
    ranks = Ranks(ORDER)
    ranks.run(1, 12)
    (message,) = warnings(caplog)
    assert "the solver highspy cannot be imported" in message
    assert "scripts/setup.sh" in message
    assert_trains_unfrozen(ranks)


def test_what_a_clock_cannot_have_shown() -> None:
    assert misreading({ACTION: 0.0}, 0.0) is None
    assert misreading({ACTION: 1.5}, 2.0) is None
    assert misreading({ACTION: math.nan}, 2.0) == "1B2 took nan ms"
    assert misreading({ACTION: 1.0}, -2.0) == "a batch took -2 ms"
