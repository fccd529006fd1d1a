import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.settings.freezing import FreezeSettings
from timelyfreeze.settings.phases import Phase, PhaseSchedule, Step

# The boundaries of the paper's Table 3.
TABLE_3 = [(60, 100, 200), (160, 200, 250), (150, 200, 250)]


def test_every_step_by_hand() -> None:
    phases = PhaseSchedule(last_warmup_step=2, last_monitor_step=7, last_ramp_step=9)
    letters = {
        Phase.WARMUP: "w",
        Phase.UPPER_BOUND: "u",
        Phase.LOWER_BOUND: "l",
        Phase.RAMP: "r",
        Phase.STABLE: "s",
    }
    assert "".join(letters[phases.phase(step)] for step in range(1, 13)) == "wwuulllrrsss"
    assert [phases.ramp(step) for step in range(1, 13)] == [0.0] * 7 + [0.5] + [1.0] * 4
    assert [phases.learning_steps(step) for step in range(1, 13)] == [
        *(0, 0),
        *(1, 2),
        *(2, 2, 2),  # every tensor is frozen
        *(3, 4, 5, 6, 7),
    ]
    assert phases.measures


def test_mixed_monitoring_by_hand() -> None:
    phases = PhaseSchedule(2, 7, 9, "mixed")
    letters = {Phase.WARMUP: "w", Phase.MIXED: "m", Phase.RAMP: "r", Phase.STABLE: "s"}
    assert "".join(letters[phases.phase(step)] for step in range(1, 13)) == "wwmmmmmrrsss"
    assert [phases.ramp(step) for step in range(1, 13)] == [0.0] * 7 + [0.5] + [1.0] * 4
    assert [phases.learning_steps(step) for step in range(1, 13)] == [0, 0, *range(1, 11)]
    assert phases.last_steps[Phase.MIXED] == 7
    assert {p for p in Phase if p.monitors} == {Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.MIXED}


@pytest.mark.parametrize("boundaries", TABLE_3)
def test_boundaries_of_table_3(boundaries: tuple[int, int, int]) -> None:
    warmup, monitor, ramp = boundaries
    phases = PhaseSchedule(*boundaries)
    half = (warmup + monitor) // 2
    assert phases.last_upper_bound_step == half
    for last, before, after in [
        (warmup, Phase.WARMUP, Phase.UPPER_BOUND),
        (half, Phase.UPPER_BOUND, Phase.LOWER_BOUND),
        (monitor, Phase.LOWER_BOUND, Phase.RAMP),
        (ramp, Phase.RAMP, Phase.STABLE),
    ]:
        assert phases.last_steps[before] == last
        assert (phases.phase(last), phases.phase(last + 1)) == (before, after)


@st.composite
def schedules(draw: st.DrawFn) -> PhaseSchedule:
    warmup = draw(st.integers(0, 50))
    monitor = warmup + draw(st.integers(2, 50))
    ramp = monitor + draw(st.integers(1, 50))
    return PhaseSchedule(warmup, monitor, ramp)


@given(schedules())
def test_phases_follow_each_other_and_both_halves_measure(phases: PhaseSchedule) -> None:
    order = list(Phase)
    seen = [order.index(phases.phase(step)) for step in range(1, phases.last_ramp_step + 3)]
    assert seen == sorted(seen)
    count = {phase: seen.count(order.index(phase)) for phase in order}
    assert count[Phase.WARMUP] == phases.last_warmup_step
    # The halves are equal up to the odd step, which goes to the lower bound.
    assert 0 <= count[Phase.LOWER_BOUND] - count[Phase.UPPER_BOUND] <= 1
    assert count[Phase.UPPER_BOUND] >= 1
    assert count[Phase.RAMP] == phases.last_ramp_step - phases.last_monitor_step


@given(schedules(), st.floats(0.0, 1.0))
def test_actual_freeze_ratio_is_equation_9(phases: PhaseSchedule, ratio: float) -> None:
    t_m, t_f = phases.last_monitor_step, phases.last_ramp_step
    for step in range(1, t_f + 5):
        ramped = ratio * (step - t_m) / (t_f - t_m)
        expected = 0.0 if step <= t_m else min(ratio, ramped)
        assert ratio * phases.ramp(step) == pytest.approx(expected, rel=1e-12)
    assert ratio * phases.ramp(t_f) == ratio
    assert ratio * phases.ramp(t_f + 1) == ratio


# --- without a plan -------------------------------------------------------------------------------


@pytest.mark.parametrize("last_warmup_step", [0, 1, 7])
def test_without_a_plan_warm_up_is_followed_by_the_stable_phase(last_warmup_step: int) -> None:
    phases = PhaseSchedule.unplanned(last_warmup_step)
    n = last_warmup_step
    assert [phases.phase(step) for step in range(1, n + 6)] == [Phase.WARMUP] * n + (
        [Phase.STABLE] * 5
    )
    assert [phases.ramp(step) for step in range(1, n + 6)] == [0.0] * n + [1.0] * 5
    assert 0.3 * phases.ramp(n + 1) == 0.3
    assert phases.last_steps[Phase.WARMUP] == n
    assert not phases.measures


def test_without_a_plan_the_warm_up_is_checked() -> None:
    with pytest.raises(ValueError, match=r"warmup_step is -1; it must be 0 or more"):
        PhaseSchedule.unplanned(-1)


@given(schedules() | st.integers(0, 50).map(PhaseSchedule.unplanned))
def test_learning_steps_are_those_after_warm_up_in_which_not_everything_is_frozen(
    phases: PhaseSchedule,
) -> None:
    t_w, t_m = phases.last_warmup_step, phases.last_monitor_step
    all_frozen = set(range((t_w + t_m) // 2 + 1, t_m + 1))
    for step in range(1, phases.last_ramp_step + 4):
        learned = [s for s in range(1, step + 1) if s > t_w and s not in all_frozen]
        assert phases.learning_steps(step) == len(learned)


@given(schedules(), st.integers(1, 40))
def test_phases_that_begin_anew_are_as_long_and_go_on_counting(
    phases: PhaseSchedule, later: int
) -> None:
    step = phases.last_ramp_step + later
    learned = phases.learning_steps(step)
    again = phases.restarted(step, learned)
    n_steps = phases.last_ramp_step - phases.last_warmup_step
    first = phases.last_warmup_step + 1
    assert [again.phase(step + 1 + i) for i in range(n_steps + 1)] == [
        phases.phase(first + i) for i in range(n_steps + 1)
    ]
    for i in range(1, n_steps + 3):
        more = phases.learning_steps(phases.last_warmup_step + i)
        assert again.learning_steps(step + i) == learned + more


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ((-1, 4, 8), "last_warmup_step is -1"),
        ((4, 5, 8), r"last_monitor_step is 5.*last_warmup_step \(4\)"),
        ((4, 3, 8), "last_monitor_step is 3"),
        ((4, 8, 8), r"last_ramp_step is 8.*last_monitor_step \(8\)"),
        ((4, 8, 7), "last_ramp_step is 7"),
        # Equal to the one before, but not all three: neither planned nor unplanned.
        ((4, 4, 8), r"last_monitor_step is 4.*last_warmup_step \(4\)"),
        ((4, 4, 3), "last_monitor_step is 4"),
        ((-1, -1, -1), "last_warmup_step is -1"),
    ],
)
def test_refuses_boundaries(boundaries: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PhaseSchedule(*boundaries)


def test_smallest_schedule() -> None:
    phases = PhaseSchedule(0, 2, 3)
    assert [phases.phase(step).value for step in (1, 2, 3, 4)] == [
        "upper_bound",
        "lower_bound",
        "ramp",
        "stable",
    ]


def test_refuses_other_arguments() -> None:
    with pytest.raises(ValueError, match="the step is 0; optimizer steps count from 1"):
        PhaseSchedule(1, 3, 5).phase(0)
    with pytest.raises(ValueError, match=r"monitoring is 'half'; known: halves, mixed"):
        PhaseSchedule(1, 3, 5, "half")


def test_control_steps_stand_among_the_stable_ones_and_learn() -> None:
    phases = PhaseSchedule(2, 4, 6, control_every=6)
    found = [step for step in range(1, 30) if phases.phase(step) is Phase.CONTROL]
    assert found == [9, 15, 21, 27]
    assert {phases.phase(step) for step in range(7, 30)} == {Phase.STABLE, Phase.CONTROL}
    assert [phases.ramp(step) for step in (8, 9, 10)] == [1.0, 0.0, 1.0]
    without = PhaseSchedule(2, 4, 6)
    assert without.phase(9) is Phase.STABLE
    assert phases.learning_steps(9) == without.learning_steps(9)
    assert phases.restarted(8, 3).phase(15) is Phase.CONTROL


@pytest.mark.parametrize(("every", "is_refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_most_steps_have_to_freeze(every: int, is_refused: bool) -> None:
    errors = [*FreezeSettings(control_every=every).errors()]
    assert any("control_every is" in error for error in errors) is is_refused
    assert FreezeSettings(control_every=every).unplanned.phases.control_every == 0


def test_a_step_says_what_follows_from_its_phase() -> None:
    phases = PhaseSchedule(2, 6, 10, control_every=6)
    former, found = Step(), []
    for number in range(1, 15):
        step = phases.at(number, former, is_off=number == 14)
        former = step
        found.append((step.is_first_of_phase, step.changes_weights, step.after_warmup, step.ramp))
    firsts = {1, 3, 5, 7, 11, 14}  # a control step, 13, is none; freezing is off in 14
    still = {5, 6}  # all frozen
    ramp = {7: 0.25, 8: 0.5, 9: 0.75, 10: 1.0, 11: 1.0, 12: 1.0}
    assert found == [
        (number in firsts, number not in still, number - 2, ramp.get(number, 0.0))
        for number in range(1, 15)
    ]
