"""Steps of a small run by hand: 200 tokens for each device."""

import math
from pathlib import Path

import pytest

from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.records.convergence import PassedEnergy
from timelyfreeze.records.tables import STEPS, StepRow
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.step_record import StepRecord


def record(folder: Path, *, emulates: bool = False) -> StepRecord:
    return StepRecord(folder, emulates=emulates)


def metrics(
    ratios: dict[int, float],
    energy: PassedEnergy | None = None,
    batch_ms: dict[Phase, tuple[float, ...]] | None = None,
) -> CollectedMetrics:
    return CollectedMetrics(batch_ms or {}, {}, 0.0, step_ratios=ratios, energy=energy)


def end(to: StepRecord, step: int, phase: Phase | None, ms: float) -> None:
    to.end_step(step, phase, ms / 1e3, 10.0 * step, 200)


def test_a_row_for_each_step_with_what_was_exchanged_later(tmp_path: Path) -> None:
    steps = record(tmp_path)
    end(steps, 1, Phase.RAMP, 200.0)
    assert STEPS.read(tmp_path) == []
    seen = metrics({1: 0.25, 2: 0.5}, PassedEnergy(3.0, 4.0), {Phase.RAMP: (9.0, 7.0, 8.0)})
    steps.log(2, 5.5, Phase.RAMP, seen, predicted_ms=8.5)
    end(steps, 2, Phase.RAMP, 100.0)
    one = StepRow(1, "ramp", 10.0, 200.0, 1000.0, freeze_ratio=0.25)
    two = StepRow(2, "ramp", 20.0, 100.0, 2000.0, None, 0.5, 8.0, 8.5, 5.5, None, 0.75)
    assert STEPS.read(tmp_path) == [one, two]


def test_a_run_that_ends_between_two_logged_steps_loses_none(tmp_path: Path) -> None:
    steps = record(tmp_path)
    end(steps, 1, Phase.STABLE, 200.0)
    steps.add_ratios(metrics({1: 0.125}))
    steps.close()
    steps.close()
    assert [(row.step, row.freeze_ratio) for row in STEPS.read(tmp_path)] == [(1, 0.125)]


def test_kappa_and_p_eff_are_told_as_they_are_known(tmp_path: Path) -> None:
    steps = record(tmp_path)
    for step, ms in enumerate((900.0, 900.0, 100.0), 1):
        end(steps, step, Phase.WARMUP, ms)
    for step, ms in enumerate((900.0, 900.0, 60.0, 70.0, 50.0), 4):
        end(steps, step, Phase.STABLE, ms)
    tags = steps.log(9, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0)))
    assert tags == pytest.approx(
        {
            "freezing/kappa": 0.6,
            "freezing/p_eff": 0.5,
            "freezing/kappa_over_p_eff": 1.2,
        }
    )
    assert steps.log(10, 5.0, Phase.STABLE, metrics({}, PassedEnergy(6.0, 6.0))) == {
        "freezing/p_eff": 1.0
    }
    # (0.5 * 2 + 1 * 6) / 8
    assert steps.p_eff == 0.875


def test_only_the_stable_phase_makes_the_runs_p_eff(tmp_path: Path) -> None:
    steps = record(tmp_path)
    for phase in (Phase.WARMUP, Phase.RAMP, Phase.OFF):
        steps.log(1, 5.0, phase, metrics({}, PassedEnergy(1.0, 2.0)))
    assert steps.p_eff is None
    steps.log(2, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0, is_complete=False)))
    assert steps.p_eff is None


def test_a_step_counts_as_much_with_replicas_as_without(tmp_path: Path) -> None:
    """Each replica tells the energy of the model."""
    steps = record(tmp_path)
    steps.log(1, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0)))
    steps.log(2, 5.0, Phase.STABLE, metrics({}, PassedEnergy(12.0, 12.0)), n_replicas=2)
    # (0.5 * 2 + 1 * 6) / 8
    assert steps.p_eff == 0.875


def test_a_run_without_freezing_froze_nothing(tmp_path: Path) -> None:
    steps = record(tmp_path)
    assert steps.log(1, 5.0) == {}
    end(steps, 1, None, 100.0)
    (row,) = STEPS.read(tmp_path)
    assert (row.phase, row.freeze_ratio, row.train_loss) == ("", 0.0, 5.0)
    assert row.kappa is row.p_eff is row.batch_ms is None


def test_an_emulations_kappa_is_by_the_virtual_clock(tmp_path: Path) -> None:
    """The virtual time of a logged step comes with the next metrics, so its row waits for it."""
    steps = record(tmp_path, emulates=True)
    end(steps, 1, Phase.WARMUP, 900.0)
    steps.log(2, 5.0, Phase.WARMUP, metrics({}))
    steps.add_virtual([(Phase.WARMUP, 90.0)])
    end(steps, 2, Phase.WARMUP, 900.0)
    assert [(row.step, row.virtual_step_ms) for row in STEPS.read(tmp_path)] == [(1, 90.0)]
    end(steps, 3, Phase.WARMUP, 900.0)
    steps.log(4, 4.0, Phase.WARMUP, metrics({}))
    steps.add_virtual([(Phase.WARMUP, 90.0), (Phase.WARMUP, 40.0)])
    end(steps, 4, Phase.STABLE, 900.0)
    for step in (5, 6, 7):
        end(steps, step, Phase.STABLE, 900.0)
    steps.add_virtual([(Phase.STABLE, ms) for ms in (7.0, 7.0, 10.0, 30.0)])
    tags = steps.log(8, 4.0, Phase.STABLE, metrics({}))
    assert tags == {"freezing/kappa": 0.5}
    steps.close()
    rows = STEPS.read(tmp_path)
    assert [row.virtual_step_ms for row in rows] == [90.0, 90.0, 40.0, 7.0, 7.0, 10.0, 30.0]
    assert [row.train_loss for row in rows] == [None, 5.0, None, 4.0, None, None, None]


def test_ranks_that_write_nothing_still_tell(tmp_path: Path) -> None:
    steps = StepRecord(None, emulates=False)
    assert steps.log(1, math.nan, Phase.WARMUP, metrics({}, PassedEnergy(0.0, 0.0))) == {
        "freezing/p_eff": 1.0
    }
    end(steps, 1, Phase.WARMUP, 5.0)
    assert list(tmp_path.iterdir()) == []
