"""An emulated run that moves to shorter pipelines: weights of one that stays, times of replicas."""

import statistics

import pytest
import torch
from elastic_scenarios import (
    N_STEPS,
    losses_of_steps,
    per_step,
    rows_folder,
    rows_of_steps,
    scenario,
)
from launcher import merged, run_scenarios

from tests.timelyfreeze.helpers.pipelines import simulate
from timelyfreeze.records import MOVES, STEPS, read_summary
from timelyfreeze.schedule.schedules import gpipe_order, one_f_one_b_order

ORDERS = {"1F1B": one_f_one_b_order, "GPipe": gpipe_order}

folder = rows_folder


@pytest.fixture(scope="module")
def runs(folder):
    emulated = {"emulation__enable": None, "metrics__enable_tensorboard": None}
    scenarios = [scenario(folder, "stays", is_elastic=False, **emulated)]
    for schedule in ORDERS:
        key = {"parallelism__pipeline_parallel_schedule": schedule}
        scenarios.append(scenario(folder, schedule, is_elastic=True, **emulated, **key))
    return run_scenarios(folder, 1, scenarios, script="elastic_run.py")


def run_folder(folder, name):
    (only,) = (folder / name / "tb").iterdir()
    return only


def frozen_of_steps(ranks):
    return {step: set(found) for step, found in per_step(ranks, "frozen").items()}


@pytest.mark.parametrize("schedule", ORDERS)
def test_weights_are_those_of_a_run_that_stays(runs, schedule):
    for of_steps in (rows_of_steps, frozen_of_steps):
        assert of_steps(runs[schedule]) == of_steps(runs["stays"])
    expected = losses_of_steps(runs["stays"])
    assert losses_of_steps(runs[schedule]) == pytest.approx(expected, rel=1e-6)
    for key in ("weights", "moments"):
        want, have = merged(runs["stays"], key), merged(runs[schedule], key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ORDERS)
def test_it_moves_and_says_so(folder, schedule):
    written = run_folder(folder, schedule)
    moves, summary = MOVES.read(written), read_summary(written)
    # After the checks of steps 4, 6 and 8.
    assert [(move.step, move.ranks, move.replicas) for move in moves] == [
        (5, 4, 1), (7, 2, 2), (9, 2, 2)]  # fmt: skip
    assert summary.moves_seconds == pytest.approx(sum(move.seconds for move in moves), rel=1e-5)
    assert (summary.steps_done, summary.emulated_ranks) == (N_STEPS, 4)
    # Two steps in each pipeline run cold; of the first there are two more.
    step_ms = statistics.median(row.virtual_step_ms for row in STEPS.read(written)[2:4])
    told = (written / "report.txt").read_text()
    assert f"a step {step_ms:,.1f} ms before" in told


@pytest.mark.parametrize("schedule", ORDERS)
def test_every_batch_is_played_through_its_own_pipeline(runs, folder, schedule):
    (seen,) = runs[schedule]
    batches = iter(zip(seen["actions"], seen["virtual_ms"], strict=True))
    for step in STEPS.read(run_folder(folder, schedule)):
        # Ranks, microbatches of a replica, replicas.
        n_ranks, n, n_replicas = (4, 8, 1) if step.step < 7 else (2, 4, 2)
        replicas = []
        for _ in range(n_replicas):
            times, batch_ms = next(batches)
            order = ORDERS[schedule](n_ranks, n)
            played = simulate(order, lambda action, times=times: times[str(action)])
            replicas.append(max(end for _, end in played.values()))
            assert batch_ms == pytest.approx(replicas[-1], rel=1e-9)
        # Beside batches a step reads rows and steps the optimizer.
        assert max(replicas) < step.virtual_step_ms < step.step_ms
    assert next(batches, None) is None


@pytest.mark.parametrize("schedule", ORDERS)
def test_nothing_of_a_former_pipeline_is_kept(runs, schedule):
    assert runs[schedule][0]["n_left_over"] == 0
