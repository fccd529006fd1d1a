"""A plan that is solved while training goes on: when it applies, and what may happen meanwhile."""

import logging
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.timelyfreeze.conftest import HereAtOnce
from tests.timelyfreeze.helpers.ranks import PHASES, Ranks, warnings, without_stable_times
from timelyfreeze.control.plans import planner, solver_job
from timelyfreeze.control.plans.solver_job import automatic_delay
from timelyfreeze.planning.background import AwaitedCall
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.schedule.order import Action, one_f_one_b_order
from timelyfreeze.settings.phases import Phase


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_job, "BackgroundCall", HereAtOnce)


ORDER = one_f_one_b_order(2, 4)
LAST = PHASES.last_monitor_step  # 6; the ramp ends at 10


def test_the_delay_follows_from_the_size_of_the_pipeline() -> None:
    assert [automatic_delay(n, 100) for n in (8, 1024, 1025)] == [0, 0, 10]
    assert [automatic_delay(5000, n) for n in (1, 2, 9, 25)] == [0, 1, 1, 2]


def test_the_plan_applies_after_the_delay_at_the_height_of_the_ramp(no_process: None) -> None:
    delayed, at_once = Ranks(ORDER, solver_delay_steps=2), Ranks(ORDER)
    at_once.run(1, LAST + 3)
    delayed.run(1, LAST + 1)
    for controller in delayed.controllers:
        assert controller.plan is None
        assert not controller.planner.lacks_plan(controller.step), "it is on its way"
    delayed.run(LAST + 2, LAST + 3)
    for rank in (0, 1):
        given = list(delayed.masks(rank, rank))
        assert given[3 * LAST : 3 * (LAST + 2)] == [{}] * 6
        assert given[3 * (LAST + 2) :] == list(at_once.masks(rank, rank))[3 * (LAST + 2) :]
        assert any(any(mask) for masks in given[3 * (LAST + 2) :] for mask in masks.values())
        plans = [each.controllers[rank].plan for each in (delayed, at_once)]
        assert plan_to_json(plans[0]) == plan_to_json(plans[1])
        assert len(delayed.solved[rank]) == 1


@pytest.mark.parametrize("stopped_at", [LAST, LAST + 1, LAST + 2])
def test_a_run_that_stops_before_there_is_a_plan_begins_solving_again(
    stopped_at: int, no_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    whole, before, after = (Ranks(ORDER, solver_delay_steps=2) for _ in range(3))
    whole.run(1, 11)
    before.run(1, stopped_at)
    state = before.saved()
    before.on_all(lambda rank: before.controllers[rank].close())
    after.load(state)
    assert after.saved() == state
    after.run(stopped_at + 1, 11)
    for rank in (0, 1):
        given = list(whole.masks(rank, rank))
        assert list(after.masks(rank, rank)) == given[3 * stopped_at :]
    assert without_stable_times(after.saved()) == without_stable_times(whole.saved())
    assert not any("Nothing is frozen" in message for message in warnings(caplog))


def test_a_shorter_delay_after_a_stop_takes_the_plan_at_once(no_process: None) -> None:
    before, after = Ranks(ORDER, solver_delay_steps=3), Ranks(ORDER, solver_delay_steps=0)
    before.run(1, LAST + 2)
    after.load(before.saved())
    before.on_all(lambda rank: before.controllers[rank].close())
    after.run(LAST + 3, LAST + 3)
    assert all(controller.plan is not None for controller in after.controllers)


class NotYet(HereAtOnce):
    """A solver that is not ready when the plan is due."""

    done = False
    hurried = 0

    def hurry(self) -> None:
        NotYet.hurried += 1


def test_a_plan_that_training_waits_for_is_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotYet, "hurried", 0)
    monkeypatch.setattr(solver_job, "BackgroundCall", NotYet)
    ranks = Ranks(ORDER, solver_delay_steps=2)
    ranks.run(1, LAST + 1)
    assert NotYet.hurried == 0
    ranks.run(LAST + 2, LAST + 2)
    assert NotYet.hurried == 1
    assert all(controller.plan is not None for controller in ranks.controllers)


def end_by_itself(**arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_solver_that_dies_takes_no_rank_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a small pipeline too, for whose plan training waits."""
    monkeypatch.setattr(solver_job, "AwaitedCall", AwaitedCall)
    monkeypatch.setattr(planner, "solve_from_times", end_by_itself)
    ranks = Ranks(ORDER)
    ranks.run(1, LAST + 1)
    assert ranks.controllers[1].plan is None
    assert "ended with exit status -9 and no answer" in warnings(caplog)[-1]


def test_a_failure_is_told_when_the_plan_is_due(caplog: pytest.LogCaptureFixture) -> None:
    def no_time(action: Action, fraction: float) -> float:
        return 0.0

    ranks = Ranks(ORDER, solver_delay_steps=2, duration_ms=no_time)
    ranks.run(1, LAST + 2)
    assert not any("Nothing is frozen" in message for message in warnings(caplog))
    ranks.run(LAST + 3, LAST + 3)
    assert "Nothing is frozen: step 9" in warnings(caplog)[-1]
    assert "lasts 0 ms" in warnings(caplog)[-1]
    after = Ranks(ORDER, solver_delay_steps=2)
    after.load(ranks.saved())
    after.run(LAST + 4, LAST + 4)
    assert after.controllers[1].planner.failure == ranks.controllers[1].planner.failure


def test_the_solver_ends_with_the_run() -> None:
    ranks = Ranks(ORDER, solver_delay_steps=3)
    ranks.run(1, LAST)
    process = ranks.controllers[0].planner._call._background._tries[0][0]
    ranks.on_all(lambda rank: ranks.controllers[rank].close())
    assert process.poll() is not None
    Ranks(ORDER).controllers[0].close()  # nothing runs


def test_waiting_for_the_plan_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(solver_job, "BackgroundCall", NotYet)
    ranks = Ranks(ORDER, solver_delay_steps=1)
    ranks.run(1, LAST + 1)
    (message,) = [m for m in warnings(caplog) if "waited" in m]
    assert "solver_delay_steps gives the solver more steps" in message
    assert sum("due at the end of step 7" in r.getMessage() for r in caplog.records) == 2
    caplog.clear()
    monkeypatch.setattr(solver_job, "BackgroundCall", HereAtOnce)
    patient = Ranks(ORDER, solver_delay_steps=2)
    patient.run(1, LAST + 2)
    assert patient.controllers[1].plan is not None
    assert patient.controllers[1].step.phase is Phase.RAMP
    assert not warnings(caplog)


def test_the_process_that_solves_loads_no_torch() -> None:
    """It would take longer to load than most plans to make."""
    code = "import sys, timelyfreeze.planning.solution; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
