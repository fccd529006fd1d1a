"""kappa, p_eff and their means, worked out by hand from Eq. 12, 27 and 28."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from timelyfreeze.records.convergence import (
    PassedEnergy,
    StepLog,
    TimedStep,
    kappa_error,
    kappa_of_cap,
    kappa_over_p_eff,
    mean_p_eff,
    passed_energy,
)
from timelyfreeze.settings.phases import Phase, PhaseSchedule


def test_p_eff_weighs_each_tensor_by_its_energy() -> None:
    # Eq. 27: (1.0 * 4 + 0.5 * 1 + 0.25 * 5) / 10
    energy = passed_energy([1.0, 0.5, 0.25], [4.0, 1.0, 5.0])
    assert energy == PassedEnergy(5.75, 10.0)
    assert energy.p_eff == 0.575


def test_p_eff_is_that_of_the_elements_written_out() -> None:
    """A tensor's mask covers all its elements, so the sum over elements is one over tensors."""
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=n) for n in (3, 5, 2)]
    frequency = [0.2, 0.9, 0.4]
    above = sum(
        p * g * g for p, tensor in zip(frequency, gradients, strict=True) for g in tensor.tolist()
    )
    below = sum(g * g for tensor in gradients for g in tensor.tolist())
    energy = passed_energy(frequency, [float(g @ g) for g in gradients])
    assert energy.p_eff == pytest.approx(above / below)


def test_ranks_are_added_before_they_are_divided() -> None:
    both = PassedEnergy(1.0, 1.0) + PassedEnergy(1.0, 9.0)
    assert both.p_eff == 0.2, "not the mean of 1 and 1/9"


def test_without_a_gradient_all_passes_and_without_its_energy_nothing_is_known() -> None:
    assert PassedEnergy(0.0, 0.0).p_eff == 1.0
    partly = passed_energy([1.0, 0.0], [3.0, math.nan])
    assert (partly.passed, partly.total, partly.p_eff) == (3.0, 3.0, None)
    assert (partly + PassedEnergy(1.0, 1.0)).p_eff is None


def test_what_frozen_tensors_keep_in_subspaces_is_let_through() -> None:
    energy = PassedEnergy(2.0, 10.0)
    assert [energy.keeping(part).p_eff for part in (0.0, 0.5, 1.0)] == [0.2, 0.6, 1.0]


def test_the_average_counts_moments_by_their_energy() -> None:
    # Eq. 28: (0.5 * 8 + 1.0 * 2) / 10
    assert mean_p_eff([(0.5, 8.0), (1.0, 2.0)]) == pytest.approx(0.6)
    assert mean_p_eff([]) is None
    assert mean_p_eff([(1.0, 0.0)]) is None


@pytest.mark.parametrize(
    ("kappa", "p_eff", "ratio"),
    [(0.6, 0.8, 0.75), (0.6, 0.5, 1.2), (None, 0.5, None), (0.6, None, None), (0.4, 0.0, None)],
)
def test_the_ratio_of_times_to_accuracy(
    kappa: float | None, p_eff: float | None, ratio: float | None
) -> None:
    got = kappa_over_p_eff(kappa, p_eff)
    assert got == (None if ratio is None else pytest.approx(ratio))


@pytest.mark.parametrize(("cap", "kappa"), [(0.0, 1.0), (1.0, 0.6), (0.8, 0.68)])
def test_kappa_of_a_cap_lies_between_the_envelopes(cap: float, kappa: float) -> None:
    """Eq. 48: 100 - 0.8 * (100 - 60) = 68 ms of 100."""
    assert kappa_of_cap(cap, 60.0, 100.0) == pytest.approx(kappa, rel=1e-12)


def test_kappa_is_a_ratio_of_medians_without_cold_steps() -> None:
    steps = StepLog()
    for ms in (900.0, 900.0, 10.0, 12.0):
        steps.add(TimedStep(Phase.WARMUP, ms))
    assert steps.kappa_since(Phase.WARMUP) == 1.0
    assert steps.kappa_since(Phase.STABLE) is None
    for ms in (700.0, 5.0, 14.0):  # the third unfrozen step that counts
        steps.add(TimedStep(Phase.UPPER_BOUND, ms))
    for ms in (1.0, 1.0, 6.0, 3.0, 30.0):
        steps.add(TimedStep(Phase.STABLE, ms))
    assert steps.kappa_since(Phase.STABLE) == pytest.approx(6.0 / 12.0)
    steps.add(TimedStep(Phase.STABLE, 9.0))
    assert steps.kappa_since(Phase.STABLE) == pytest.approx(9.0 / 12.0), "only what is new"
    assert steps.kappa_since(Phase.STABLE) is None


def test_what_subspaces_take_is_no_part_of_an_unfrozen_step() -> None:
    steps = StepLog()
    for phase, turning_ms in ((Phase.WARMUP, 30.0), (Phase.UPPER_BOUND, 10.0), (Phase.STABLE, 5.0)):
        for _ in range(5):
            steps.add(TimedStep(phase, 100.0 + turning_ms, 1.0, turning_ms))
    summary = steps.summed_up(freezes=True)
    assert (summary["step_ms_unfrozen"], summary["step_ms"]) == (100.0, 105.0)
    assert steps.kappa_error() == 0.0
    assert steps.kappa_since(Phase.STABLE) == 1.05


def test_kappa_of_a_later_pipeline_is_over_unfrozen_steps_of_the_first() -> None:
    steps = StepLog()
    steps.begin_pipeline()  # nothing was measured before
    for ms in (9.0, 9.0, 10.0):
        steps.add(TimedStep(Phase.UPPER_BOUND, ms))
    steps.begin_pipeline()
    for ms in (4.0, 4.0, 4.0, 4.0):
        steps.add(TimedStep(Phase.UPPER_BOUND, ms))
    for ms in (5.0, 5.0, 5.0):
        steps.add(TimedStep(Phase.STABLE, ms))
    assert steps.kappa_since(Phase.STABLE) == pytest.approx(5.0 / 10.0)


def test_the_error_of_kappa_is_how_far_simulated_runs_lie_apart() -> None:
    rng = np.random.default_rng(0)
    runs = 4000
    before, after = rng.normal(100.0, 5.0, (runs, 15)), rng.normal(80.0, 2.0, (runs, 41))
    kappas = np.median(after, axis=1) / np.median(before, axis=1)
    errors = [kappa_error(b, a) for b, a in zip(before.tolist(), after.tolist(), strict=True)]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(kappas.std(), rel=0.1)


def test_two_steps_do_not_tell_how_far_others_may_lie() -> None:
    assert kappa_error([1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert kappa_error([1.0, 2.0, 3.0], [1.0]) is None
    assert kappa_error([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]) is None, "a clock that stands still"
    assert kappa_error([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == 0.0


def test_a_run_without_unfrozen_steps_has_no_kappa() -> None:
    steps = StepLog()
    for _ in range(5):
        steps.add(TimedStep(Phase.STABLE, 3.0))
    assert steps.kappa_since(Phase.STABLE) is None


# -- control steps ---------------------------------------------------------------------------------


def replayed(speed: Callable[[int], float], *, control_every: int = 20) -> StepLog:
    """Steps of the default run, of 620 ms and 0.89 of that, on a machine that becomes slower."""
    rng, steps = np.random.default_rng(1), StepLog()
    phases = PhaseSchedule(10, 18, 19, "mixed", control_every=control_every)
    frozen = {Phase.MIXED: 0.9, Phase.RAMP: 0.89, Phase.STABLE: 0.89}
    for step in range(1, 121):
        phase = phases.phase(step)
        ms = 620.0 * frozen.get(phase, 1.0) * speed(step) * rng.normal(1.0, 0.01)
        steps.add(TimedStep(phase, ms, 1000.0))
    return steps


def busy_later(step: int) -> float:
    """Two other programs begin after the warm-up, and one of them ends: as long, 3.8, 2 times."""
    return 1.0 if step <= 14 else 3.8 if step <= 75 else 2.0


def gain_of(steps: StepLog) -> float:
    summary = steps.summed_up(freezes=True)
    before_ms, after_ms = summary["step_ms_unfrozen"], summary["step_ms"]
    assert before_ms is not None
    assert after_ms is not None
    speeds = summary["tokens_per_second"], summary["tokens_per_second_unfrozen"]
    assert None not in speeds
    assert speeds[0] / speeds[1] == pytest.approx(before_ms / after_ms)  # type: ignore[operator]
    return before_ms / after_ms - 1.0


@pytest.mark.parametrize(
    "speed", [busy_later, lambda step: 1.0 + step / 60.0, lambda step: 4.0 if step < 15 else 1.0]
)
def test_the_gain_is_that_of_a_quiet_machine_whatever_the_speed(
    speed: Callable[[int], float],
) -> None:
    quiet, busy = replayed(lambda step: 1.0), replayed(speed)
    assert gain_of(quiet) == pytest.approx(1 / 0.89 - 1.0, abs=0.03)
    assert gain_of(busy) == pytest.approx(gain_of(quiet), abs=0.03)
    assert busy.kappa_since(Phase.STABLE) == pytest.approx(0.89, abs=0.05)
    error = busy.kappa_error()
    assert error is not None
    assert 0.0 < error < 0.02
    # Without control steps the same figures compare two machines, as it were.
    assert abs(gain_of(replayed(speed, control_every=0)) - gain_of(quiet)) > 0.1


def test_a_control_step_is_compared_with_the_frozen_steps_around_it() -> None:
    steps = StepLog()
    for ms in (100.0, 100.0, 100.0, 100.0):
        steps.add(TimedStep(Phase.WARMUP, ms))
    for ms, phase in (
        (7.0, Phase.STABLE), (8.0, Phase.STABLE), (10.0, Phase.CONTROL), (6.0, Phase.STABLE),
    ):  # fmt: skip
        steps.add(TimedStep(phase, ms))
    assert steps.paired_kappas() == [0.7]
    assert steps.kappa_since(Phase.STABLE) == 0.7
    assert steps.kappa_error() is None, "one does not tell how far others may lie"
    assert steps.summed_up(freezes=True)["step_ms_unfrozen"] == pytest.approx(10.0 * 6.0 / 7.0)
    for ms in (40.0, 40.0, 80.0):
        steps.add(TimedStep(Phase.CONTROL, ms))
        steps.add(TimedStep(Phase.STABLE, 40.0))
    assert steps.paired_kappas() == [0.7, 23.0 / 40.0, 1.0, 0.5]
    assert steps.paired_kappas(2) == [1.0, 0.5]
    summary = steps.summed_up(freezes=True)
    assert summary["step_ms"] == 40.0
    assert summary["step_ms_unfrozen"] == pytest.approx(40.0 / ((0.7 + 23.0 / 40.0) / 2))
    steps.begin_pipeline()
    assert steps.paired_kappas() == []
