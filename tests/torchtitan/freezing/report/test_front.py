"""The front of a small run by hand: two batches a step."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.torchtitan.helpers.report_runs import end_step, run_in
from timelyfreeze.control.collected import ObservedBatch
from timelyfreeze.policies import Decision, Evaluation
from timelyfreeze.records.tables import FRONT, PLASTICITY, FrontRow, PlasticityRow
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.monitoring import BatchRecord
from torchtitan.freezing.report.steps import Front


def batch(
    step: int, phase: Phase = Phase.STABLE, entry_stage: int | None = None, **policy: float
) -> ObservedBatch:
    record = BatchRecord({}, 1.0)
    return ObservedBatch(
        step,
        phase,
        False,
        record,
        {},
        entry_stage=entry_stage,
        policy=policy,
    )


def front_of(folder: Path, *, caches: bool) -> Front:
    checks = SimpleNamespace(decision=None)
    controller = SimpleNamespace(cache=object() if caches else None, checks=checks, phase=None)
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
    in_force = {row.phase for row in FRONT.read(tmp_path) if row.frozen_layers == 3}
    assert in_force == {"ramp", "stable"}
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
