"""Steps of a small run by hand: 200 tokens for each device."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.torchtitan.helpers.report_runs import end_step, log_step, run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.control.collected import CollectedMetrics, ObservedBatch
from timelyfreeze.policies import Decision, Evaluation
from timelyfreeze.records.convergence import PassedEnergy, StepLog, TimedStep
from timelyfreeze.records.tables import (
    FRONT,
    MOVES,
    PLASTICITY,
    STEPS,
    FrontRow,
    Move,
    PlasticityRow,
    StepRow,
)
from timelyfreeze.settings.phases import Phase, PhaseSchedule, Step
from timelyfreeze.timing.monitoring import BatchRecord
from torchtitan.freezing.report.steps import Front, Moves, Steps, TimedMove, timed_moves


def steps_in(
    folder: Path,
    *,
    emulates: bool = False,
    predicted_ms: float | None = None,
    control_every: int = 0,
) -> Steps:
    phases = PhaseSchedule(1, 3, 4, control_every=control_every)
    controller = SimpleNamespace(
        expected_batch_ms=lambda: predicted_ms,
        active_plan=SimpleNamespace(bounds=None),
        phases=phases,
    )
    start = make_summary(n_devices=4, ranks_per_replica=4)
    run = run_in(folder, start, controller=controller)
    if emulates:
        run.config.emulation.enable = True
        run.emulation = SimpleNamespace(  # type: ignore[assignment]
            steps=StepLog(), metrics=dict, take_steps_ms=list, end_step=lambda *_: None
        )
    return Steps(run)


def metrics(
    ratios: dict[int, float],
    energy: PassedEnergy | None = None,
    batch_ms: dict[Phase, tuple[float, ...]] | None = None,
) -> CollectedMetrics:
    return CollectedMetrics(batch_ms or {}, {}, 0.0, step_ratios=ratios, energy=energy)


def end(to: Steps, step: int, phase: Phase | None, ms: float) -> None:
    to.run.seconds = 10.0 * step - ms / 1e3
    to.run.steps.add(TimedStep(phase, ms))  # as ``StepTimes`` does
    end_step(to, step, phase, ms / 1e3)


def add_virtual(to: Steps, *steps: tuple[Phase, float]) -> None:
    for phase, ms in steps:
        to.run.emulation.steps.add(TimedStep(phase, ms))
    to.add_virtual([ms for _, ms in steps])


def test_a_row_for_each_step_with_what_was_exchanged_later(tmp_path: Path) -> None:
    steps = steps_in(tmp_path, predicted_ms=8.5)
    end(steps, 1, Phase.RAMP, 200.0)
    assert STEPS.read(tmp_path) == []
    seen = metrics({1: 0.25, 2: 0.5}, PassedEnergy(3.0, 4.0), {Phase.RAMP: (9.0, 7.0, 8.0)})
    log_step(steps, 2, 5.5, Phase.RAMP, seen)
    end(steps, 2, Phase.RAMP, 100.0)
    one = StepRow(1, "ramp", 10.0, 200.0, 1000.0, freeze_ratio=0.25)
    two = StepRow(2, "ramp", 20.0, 100.0, 2000.0, None, 0.5, 8.0, 8.5, 5.5, None, 0.75)
    assert STEPS.read(tmp_path) == [one, two]


def test_what_subspaces_keep_counts_as_updated(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    steps.run.controller.active_plan.bounds = SimpleNamespace(captured=0.5)
    log_step(steps, 2, 5.5, Phase.STABLE, metrics({}, PassedEnergy(3.0, 4.0)))
    end(steps, 2, Phase.STABLE, 100.0)
    assert [row.p_eff for row in STEPS.read(tmp_path)] == [0.875]
    assert steps.p_eff == 0.875


def test_a_run_that_ends_between_two_logged_steps_loses_none(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    end(steps, 1, Phase.STABLE, 200.0)
    steps.collect(metrics({1: 0.125}))
    steps.close()
    steps.close()
    assert [(row.step, row.freeze_ratio) for row in STEPS.read(tmp_path)] == [(1, 0.125)]


def test_kappa_and_p_eff_are_told_as_they_are_known(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    for step, ms in enumerate((900.0, 900.0, 100.0), 1):
        end(steps, step, Phase.WARMUP, ms)
    for step, ms in enumerate((900.0, 900.0, 60.0, 70.0, 50.0), 4):
        end(steps, step, Phase.STABLE, ms)
    tags = log_step(steps, 9, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0)))
    assert tags == pytest.approx(
        {"freezing/kappa": 0.6, "freezing/p_eff": 0.5, "freezing/kappa_over_p_eff": 1.2}
    )
    assert log_step(steps, 10, 5.0, Phase.STABLE, metrics({}, PassedEnergy(6.0, 6.0))) == {
        "freezing/p_eff": 1.0
    }
    # (0.5 * 2 + 1 * 6) / 8
    assert steps.p_eff == 0.875


def test_only_the_stable_phase_makes_the_runs_p_eff(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    for phase in (Phase.WARMUP, Phase.RAMP, Phase.OFF):
        log_step(steps, 1, 5.0, phase, metrics({}, PassedEnergy(1.0, 2.0)))
    assert steps.p_eff is None
    log_step(steps, 2, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0, is_complete=False)))
    assert steps.p_eff is None


def test_a_step_counts_as_much_with_replicas_as_without(tmp_path: Path) -> None:
    """Each replica tells the energy of the model."""
    steps = steps_in(tmp_path)
    log_step(steps, 1, 5.0, Phase.STABLE, metrics({}, PassedEnergy(1.0, 2.0)))
    steps.run.ranks_per_replica = 2  # of the 4 processes
    log_step(steps, 2, 5.0, Phase.STABLE, metrics({}, PassedEnergy(12.0, 12.0)))
    # (0.5 * 2 + 1 * 6) / 8
    assert steps.p_eff == 0.875


def test_a_run_without_freezing_froze_nothing(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    assert log_step(steps, 1, 5.0) == {}
    end(steps, 1, None, 100.0)
    (row,) = STEPS.read(tmp_path)
    assert (row.phase, row.freeze_ratio, row.train_loss) == ("", 0.0, 5.0)
    assert row.kappa is row.p_eff is row.batch_ms is None


def test_an_emulations_kappa_is_by_the_virtual_clock(tmp_path: Path) -> None:
    """The virtual time of a logged step comes with the next metrics, so its row waits for it."""
    steps = steps_in(tmp_path, emulates=True)
    end(steps, 1, Phase.WARMUP, 900.0)
    log_step(steps, 2, 5.0, Phase.WARMUP, metrics({}))
    add_virtual(steps, (Phase.WARMUP, 90.0))
    end(steps, 2, Phase.WARMUP, 900.0)
    assert [(row.step, row.virtual_step_ms) for row in STEPS.read(tmp_path)] == [(1, 90.0)]
    end(steps, 3, Phase.WARMUP, 900.0)
    log_step(steps, 4, 4.0, Phase.WARMUP, metrics({}))
    add_virtual(steps, (Phase.WARMUP, 90.0), (Phase.WARMUP, 40.0))
    end(steps, 4, Phase.STABLE, 900.0)
    for step in (5, 6, 7):
        end(steps, step, Phase.STABLE, 900.0)
    add_virtual(steps, *((Phase.STABLE, ms) for ms in (7.0, 7.0, 10.0, 30.0)))
    tags = log_step(steps, 8, 4.0, Phase.STABLE, metrics({}))
    assert tags == {"freezing/kappa": 0.5}
    steps.close()
    rows = STEPS.read(tmp_path)
    assert [row.virtual_step_ms for row in rows] == [90.0, 90.0, 40.0, 7.0, 7.0, 10.0, 30.0]
    assert [row.train_loss for row in rows] == [None, 5.0, None, 4.0, None, None, None]


def test_ranks_that_write_nothing_still_tell(tmp_path: Path) -> None:
    steps = steps_in(tmp_path)
    (tmp_path / STEPS.name).unlink()
    steps.run.is_shown = False
    assert log_step(steps, 1, math.nan, Phase.WARMUP, metrics({}, PassedEnergy(0.0, 0.0))) == {
        "freezing/p_eff": 1.0
    }
    end(steps, 1, Phase.WARMUP, 5.0)
    assert list(tmp_path.iterdir()) == []


def batch(
    step: int, phase: Phase = Phase.STABLE, entry_stage: int | None = None, **policy: float
) -> ObservedBatch:
    record = BatchRecord({}, 1.0)
    return ObservedBatch(step, phase, False, record, {}, entry_stage=entry_stage, policy=policy)


def front_of(folder: Path, *, caches: bool) -> Front:
    checks = SimpleNamespace(decision=None)
    controller = SimpleNamespace(cache=object() if caches else None, checks=checks, step=Step())
    return Front(run_in(folder, controller=controller))


def decide(record: Front, decision: Decision | None) -> None:
    record.run.controller.checks.decision = decision  # type: ignore[union-attr]
    end_step(record, 1, None, 1.0)


def test_a_row_for_each_step_with_the_batches_that_were_read(tmp_path: Path) -> None:
    record = front_of(tmp_path, caches=True)
    guided = {"frozen_layers": 4.0, "frozen_modules": 2.0, "bootstrapping": 0.0, "slope": 0.5}
    record.batch(batch(1, **guided))
    record.batch(batch(1, entry_stage=1, **guided))
    record.close()
    record.batch(batch(2, entry_stage=0, **guided))
    record.batch(batch(2, entry_stage=1, **guided))
    record.close()
    record.close()
    assert FRONT.read(tmp_path) == [
        FrontRow(1, "stable", 4, 2, 1, 2, 0),
        FrontRow(2, "stable", 4, 2, 2, 2, 0),
    ]


def test_without_a_cache_nothing_is_said_of_reading(tmp_path: Path) -> None:
    record = front_of(tmp_path, caches=False)
    record.batch(batch(1, frozen_layers=1.0))
    record.batch(batch(1, frozen_layers=1.0))
    record.close()
    assert FRONT.read(tmp_path) == [FrontRow(1, "stable", 1, 2)]


def test_a_choice_that_is_not_in_force_is_no_front(tmp_path: Path) -> None:
    """In warm-up and monitoring, and where freezing is switched off."""
    record = front_of(tmp_path, caches=False)
    for step, phase in enumerate(Phase, start=1):
        record.batch(batch(step, phase, frozen_layers=3.0))
    record.close()
    active_plan = {row.phase for row in FRONT.read(tmp_path) if row.frozen_layers == 3}
    assert active_plan == {"ramp", "stable"}
    assert {row.frozen_layers for row in FRONT.read(tmp_path)} == {0, 3}


def test_a_run_that_freezes_no_front_has_no_file(tmp_path: Path) -> None:
    record = front_of(tmp_path, caches=False)
    record.batch(batch(1, frozen_tensors=3.0))
    decide(record, None)
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_evaluations_are_taken_once_from_each_decision(tmp_path: Path) -> None:
    record = front_of(tmp_path, caches=False)
    first, second = (
        Decision(np.zeros(1, dtype=np.bool_), evaluations=(Evaluation(step, 0, 0.5, 0.25),))
        for step in (4, 6)
    )
    for decision in (first, first, second, second):
        decide(record, decision)
    record.close()
    decide(record, second)
    record.close()
    assert PLASTICITY.read(tmp_path) == [PlasticityRow(s, 0, 0.5, 0.25) for s in (4, 6)]


FIRST = Move(6, 3, 4, 1, "4 2 2 2", 2.5)
SECOND = Move(8, 8, 2, 2, "8 2", 1.25)


def test_steps_before_and_after_without_those_that_run_cold(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path))
    steps = moves.run.steps
    for ms in (9e3, 9e3, 500.0, 700.0, 600.0):
        steps.add(TimedStep(None, ms))
    assert not (tmp_path / MOVES.name).exists(), "a run that stays has no such file"
    for move, times_ms in ((FIRST, (9e3, 9e3)), (SECOND, (9e3, 9e3, 200.0))):
        steps.begin_pipeline()
        moves.move(move)
        for ms in times_ms:
            steps.add(TimedStep(None, ms))
    assert timed_moves(moves.run) == [TimedMove(FIRST, 600.0, None), TimedMove(SECOND, None, 200.0)]


def test_each_move_is_on_disk_at_once(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path))
    moves.move(FIRST)
    assert MOVES.read(tmp_path) == [FIRST]
    moves.move(SECOND)
    assert MOVES.read(tmp_path) == [FIRST, SECOND]


def test_ranks_that_write_nothing_know_of_moves(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path, is_shown=False))
    moves.run.steps.begin_pipeline()
    moves.move(FIRST)
    assert [timed.move for timed in timed_moves(moves.run)] == [FIRST]
    assert list(tmp_path.iterdir()) == []
