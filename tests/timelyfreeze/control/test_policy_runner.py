"""When a policy is asked, what it is told, and what of its answer is kept: one rank."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.timelyfreeze.helpers.ranks import HandClock
from tests.timelyfreeze.helpers.stub_policy import (
    EVERYTHING,
    LAYOUT,
    NOTHING,
    STAGES,
    WEIGHTS,
    N,
    StubMeter,
    StubPolicy,
    choose_by_number,
)
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies.policy import Check, Metric
from timelyfreeze.settings.phases import PhaseSchedule

# Warm-up, monitoring in two halves of which the second changes no weights, ramp; the last two
# without a plan.
PHASES = [
    PhaseSchedule(2, 6, 10),
    PhaseSchedule(0, 7, 9),
    PhaseSchedule(3, 5, 6),
    PhaseSchedule(0, 20, 30),
    PhaseSchedule.unplanned(4),
    PhaseSchedule.unplanned(0),
]


class Alone:
    """An exchange of one rank."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.n_gathers = 0

    def all_gather(self, value: Any) -> list[Any]:
        self.n_gathers += 1
        return [value]


class Recorded:
    """A check of one rank with everything that happened, in order."""

    def __init__(
        self,
        policy: StubPolicy | None = None,
        phases: PhaseSchedule = PHASES[-1],
    ) -> None:
        self.seen: list[Check] = []
        self.calls: list[tuple[int, str]] = []
        self.step, self.phases = 0, phases
        self.clock, self.exchange = HandClock(), Alone()
        policy = policy or StubPolicy(lambda check: NOTHING)
        choose = policy.choose

        def remember(check: Check) -> np.ndarray:
            self.seen.append(check)
            return choose(check)

        policy = StubPolicy(remember, policy.check_interval, policy.measurement, policy.wrong)
        self.meter = StubMeter(LAYOUT.names, WEIGHTS, self._called)
        self.checks = PolicyRunner(
            policy,
            LAYOUT,
            [(name, torch.empty(0)) for name in LAYOUT.names],
            self.exchange,  # type: ignore[arg-type]
            None if policy.measurement is None else self.meter,  # type: ignore[arg-type]
            self.clock,
            seed=7,
            frequency=lambda: np.ones(N),
        )

    def _called(self, call: str) -> None:
        self.calls.append((self.step, call))
        self.clock.now_ms += {"begin": 2.0, "add_step": 1.0, "take": 5.0}[call]

    def run(self, first: int, last: int) -> None:
        for self.step in range(first, last + 1):
            step = self.phases.at(self.step)
            self.checks.begin_step(step)
            self.clock.now_ms += 100.0  # the step itself
            self.checks.end_step(step)


def by_counting(phases: PhaseSchedule, interval: int, last: int) -> list[tuple[int, str]]:
    """What happens in which step, counted off one by one."""
    warmup, monitor = phases.last_warmup_step, phases.last_monitor_step
    unchanged = range((warmup + monitor) // 2 + 1, monitor + 1)
    happens = []
    left = interval
    for step in range(warmup + 1, last + 1):
        if step == warmup + 1:
            happens.append((step, "begin"))
        if step not in unchanged:
            happens.append((step, "add_step"))
            left -= 1
            if left == 0:
                happens.append((step, "take"))
                left = interval
    return happens


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("phases", PHASES, ids=str)
def test_a_check_is_due_after_every_interval_of_steps_that_change_weights(
    phases: PhaseSchedule, interval: int
) -> None:
    recorded = Recorded(StubPolicy(lambda check: NOTHING, interval), phases)
    recorded.run(1, 50)
    wanted = by_counting(phases, interval, 50)
    assert recorded.calls == wanted
    n_checks = sum(call == "take" for _, call in wanted)
    assert n_checks > 0
    assert [check.number for check in recorded.seen] == list(range(n_checks + 1))
    assert recorded.exchange.n_gathers == n_checks


def test_where_a_run_plans_anew_its_checks_go_on() -> None:
    """Steps 5, 6 and 15, 16 change no weights; every third of the others has a check."""
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3), PHASES[0])
    recorded.run(1, 12)
    recorded.phases = PHASES[0].restarted(12, 8)
    recorded.run(13, 20)
    takes = [step for step, call in recorded.calls if call == "take"]
    assert takes == [7, 10, 13, 18]
    assert [step for step, call in recorded.calls if call == "begin"] == [3]
    assert [check.number for check in recorded.seen] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("phases", PHASES, ids=str)
def test_without_a_measurement_checks_come_alike_and_ranks_exchange_nothing(
    phases: PhaseSchedule,
) -> None:
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3, measurement=None), phases)
    recorded.run(1, 50)
    n_checks = sum(call == "take" for _, call in by_counting(phases, 3, 50))
    assert [(check.number, dict(check.metrics)) for check in recorded.seen] == [
        (number, {}) for number in range(n_checks + 1)
    ]
    assert recorded.calls == []
    assert recorded.exchange.n_gathers == 0
    assert recorded.checks.n_bytes == 0
    assert recorded.checks.tensor_state() == {}
    recorded.checks.load_tensor_state({})


def test_the_policy_is_asked_before_the_first_step_and_its_choice_holds_until_the_next_check() -> (
    None
):
    masks = [LAYOUT.stages < k for k in (0, 1, 2, 3)]
    recorded = Recorded(StubPolicy(choose_by_number(*masks), 2), PhaseSchedule.unplanned(1))
    (start,) = recorded.seen
    assert (start.number, start.layout, dict(start.metrics), start.seed) == (0, LAYOUT, {}, 7)
    held = []
    for step in range(1, 9):
        recorded.run(step, step)
        held.append(int(recorded.checks.decision.memory["numbers"][-1]))
        assert np.array_equal(recorded.checks.decision.frozen, masks[min(held[-1], 3)])
    assert held == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [check.step for check in recorded.seen] == [0, 3, 5, 7], "the step that has ended"
    assert recorded.checks.decision.memory == {"numbers": [0, 1, 2, 3]}, "each saw the one before"


def test_metrics_are_those_of_the_interval() -> None:
    """The stub meter's numbers are weights times steps."""
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3), PhaseSchedule(1, 6, 8))
    recorded.run(1, 9)  # 2, 3 and 7; 8 and 9 are of the next interval
    (_, check) = recorded.seen
    wanted = 3 * np.array([WEIGHTS[name] for name in LAYOUT.names])
    assert check.metrics.keys() == {Metric.ABS_SUM, Metric.SQUARE_SUM}
    assert np.array_equal(check.metrics[Metric.ABS_SUM], wanted)
    assert np.array_equal(check.metrics[Metric.SQUARE_SUM], wanted**2)
    assert check.metrics[Metric.ABS_SUM].dtype == np.float64


@pytest.mark.parametrize("first", [3, 4, 6])
def test_a_run_that_begins_after_warm_up_measures_from_there(first: int) -> None:
    """As one does whose checkpoint was loaded without the state of freezing."""
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3), PhaseSchedule.unplanned(2))
    recorded.run(first, 8)
    assert [step for step, call in recorded.calls if call == "begin"] == [first]
    # From step 3 on, every third step ends with a check; the first interval may be shorter.
    n_first = 3 - (first - 3) % 3
    steps = [
        check.metrics[Metric.ABS_SUM][0] / WEIGHTS[LAYOUT.names[0]] for check in recorded.seen[1:]
    ]
    assert steps == [n_first, 3][: len(steps)]
    assert [check.number for check in recorded.seen[1:]] == ([1, 2] if first < 6 else [2])


# -- what was decided ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_masks_and_shares_of_a_stage_are_those_of_its_own_tensors(seed: int) -> None:
    frozen = np.random.default_rng(seed).random(N) < 0.5
    names = {name for name, is_frozen in zip(LAYOUT.names, frozen, strict=True) if is_frozen}
    checks = Recorded(StubPolicy(lambda check: frozen)).checks
    for stage, tensors in STAGES.items():
        assert checks.frozen(stage).dtype == np.bool_
        assert checks.frozen(stage).tolist() == [name in names for name, _ in tensors]
        fraction = sum(size for name, size in tensors if name in names) / sum(s for _, s in tensors)
        assert checks.frozen_ratio(stage) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("n_frozen", "first_live"), [(0, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 3), (9, 3), (10, 4)]
)
def test_the_first_live_stage_follows_the_frozen_front(n_frozen: int, first_live: int) -> None:
    checks = Recorded(StubPolicy(lambda check: np.arange(N) < n_frozen)).checks
    assert checks.first_live_stage == first_live


def test_one_live_tensor_makes_a_stage_live_wherever_it_is() -> None:
    frozen = EVERYTHING.copy()
    frozen[2] = False  # the last tensor of stage 0
    assert Recorded(StubPolicy(lambda check: frozen)).checks.first_live_stage == 0


def test_what_no_backward_has_reached_stays_as_it_was_measured_last() -> None:
    """The first tensor is not reached in the first two intervals, the second one after them."""
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 2))
    take = recorded.meter.take

    def take_known() -> dict[Metric, list[float | None]]:
        missing = 0 if len(recorded.seen) < 3 else 1
        rows = take().items()
        return {
            metric: [None if i == missing else value for i, value in enumerate(row)]
            for metric, row in rows
        }

    recorded.meter.take = take_known  # type: ignore[method-assign, assignment]
    recorded.run(1, 4)
    resumed = Recorded(StubPolicy(lambda check: NOTHING, 2))
    resumed.meter.take = take_known  # type: ignore[method-assign, assignment]
    resumed.checks.load_plain_state(json.loads(json.dumps(recorded.checks.plain_state())))
    resumed.checks.load_tensor_state(recorded.checks.tensor_state())
    for each in (recorded, resumed):
        each.run(5, 6)
    first, second = (2 * WEIGHTS[name] for name in LAYOUT.names[:2])
    seen = [check.metrics[Metric.ABS_SUM][:2].tolist() for check in recorded.seen[1:]]
    assert np.isnan([row[0] for row in seen[:2]]).all()
    assert [row[1] for row in seen] == [second] * 3
    assert seen[2][0] == first
    assert resumed.seen[-1].metrics[Metric.ABS_SUM][1] == second


# -- errors --------------------------------------------------------------------------------------


def test_wrong_settings_are_refused_all_at_once() -> None:
    wrong = ("freezing.stub.a is 1; it must be 2", "freezing.stub.b is 3; it must be 4")

    def choose(check: Check) -> np.ndarray:
        raise AssertionError("a policy with errors must not decide")

    with pytest.raises(ValueError, match=f"^{'; '.join(wrong)}$"):
        Recorded(StubPolicy(choose, wrong=wrong))


def test_a_model_that_the_policy_refuses_is_refused() -> None:
    def choose(check: Check) -> np.ndarray:
        raise ValueError("freezing.stub.layers is 9; the model has 4")

    with pytest.raises(ValueError, match=r"freezing\.stub\.layers is 9; the model has 4"):
        Recorded(StubPolicy(choose))


# -- what it costs ---------------------------------------------------------------------------------


def test_cost_is_the_mean_time_that_a_step_spends_on_scores() -> None:
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3), PhaseSchedule.unplanned(2))
    assert recorded.checks.n_bytes == StubMeter.n_bytes
    assert recorded.checks.take_ms_per_step() == 0.0
    recorded.run(1, 2)
    assert recorded.checks.take_ms_per_step() == 0.0
    recorded.run(3, 6)  # begin 2 ms, four steps of 1 ms, one check of 5 ms
    assert recorded.checks.take_ms_per_step() == pytest.approx((2.0 + 4.0 + 5.0) / 4)
    assert recorded.checks.take_ms_per_step() == 0.0, "nothing is counted twice"
    recorded.run(7, 7)
    assert recorded.checks.take_ms_per_step() == pytest.approx(1.0)


def test_the_device_is_waited_for_before_its_marks_are_read() -> None:
    recorded = Recorded(StubPolicy(lambda check: NOTHING, 3))
    waited: list[float] = []
    recorded.clock.wait = waited.append  # type: ignore[method-assign]
    recorded.run(1, 2)
    assert waited == [], "training must not wait"
    recorded.checks.take_ms_per_step()
    assert waited == [recorded.clock.now_ms]


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phases", PHASES[::2], ids=str)
@pytest.mark.parametrize("stopped_at", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_a_resumed_run_decides_as_one_that_never_stopped(
    phases: PhaseSchedule, stopped_at: int
) -> None:
    def choose(check: Check) -> np.ndarray:
        if not check.metrics:
            return NOTHING
        return check.metrics[Metric.ABS_SUM] < 4.0 * check.number

    whole, before, after = (Recorded(StubPolicy(choose, 3), phases) for _ in range(3))
    whole.run(1, 20)
    before.run(1, stopped_at)
    after.checks.load_plain_state(json.loads(json.dumps(before.checks.plain_state())))
    after.checks.load_tensor_state({k: v.clone() for k, v in before.checks.tensor_state().items()})
    assert np.array_equal(after.checks.decision.frozen, before.checks.decision.frozen)
    assert after.checks.decision.memory == before.checks.decision.memory
    assert after.checks.decision.metrics == before.checks.decision.metrics
    after.run(stopped_at + 1, 20)
    assert after.calls == [call for call in whole.calls if call[0] > stopped_at]
    numbers = [(c.number, c.metrics[Metric.ABS_SUM].tolist()) for c in after.seen[1:]]
    wanted = [(c.number, c.metrics[Metric.ABS_SUM].tolist()) for c in whole.seen[1:]]
    assert numbers == wanted[len(before.seen) - 1 :]
    assert json.dumps(after.checks.plain_state()) == json.dumps(whole.checks.plain_state())
    assert whole.checks.decision.frozen.any()


@pytest.mark.parametrize("frozen", [NOTHING, EVERYTHING, np.arange(N) % 3 == 1])
def test_every_decision_survives_json(frozen: np.ndarray) -> None:
    before = Recorded(StubPolicy(lambda check: frozen))
    after = Recorded(StubPolicy(lambda check: ~frozen))
    after.checks.load_plain_state(json.loads(json.dumps(before.checks.plain_state())))
    assert np.array_equal(after.checks.decision.frozen, frozen)
    assert after.checks.decision.frozen.dtype == np.bool_
    assert after.checks.decision.metrics == {"frozen_tensors": frozen.sum()}


class OtherPolicy(StubPolicy):
    """Another method that could be wrong for the first."""


def test_a_decision_of_another_policy_is_refused() -> None:
    state = Recorded().checks.plain_state()
    other = PolicyRunner(
        OtherPolicy(lambda check: NOTHING, measurement=None),
        LAYOUT,
        [],
        Alone(),  # type: ignore[arg-type]
        None,
        HandClock(),
        seed=7,
    )
    with pytest.raises(
        ValueError,
        match=r"the checkpoint has a decision of StubPolicy\(.*\), this run has OtherPolicy\(.*\); "
        r"resume with the same method and settings, or, "
        "to begin freezing again, load the checkpoint without it",
    ):
        other.load_plain_state(state)


def test_it_is_told_once_when_nothing_is_trained_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Interval 2, no warm-up: checks after steps 2, 4, 6, 8, 10; all frozen after 4, 6 and 10.
    everything = ~NOTHING
    recorded = Recorded(StubPolicy(lambda c: everything if c.number in (2, 3, 5) else NOTHING))
    recorded.run(1, 12)
    told = [message for message in caplog.messages if "every tensor is frozen" in message]
    assert [message.split(" on every")[0] for message in told] == ["From step 5", "From step 11"]


@pytest.mark.parametrize("phases", PHASES)
@pytest.mark.parametrize("interval", [1, 3])
def test_a_step_tells_whether_a_decision_ends_it(phases: PhaseSchedule, interval: int) -> None:
    recorded = Recorded(StubPolicy(lambda check: NOTHING, interval), phases)
    told = []
    for step in range(1, 41):
        recorded.checks.begin_step(phases.at(step))
        told.append(recorded.checks.decides)
        n_before = len(recorded.seen)
        recorded.checks.end_step(phases.at(step))
        assert told[-1] == (len(recorded.seen) > n_before)
    assert any(told)
