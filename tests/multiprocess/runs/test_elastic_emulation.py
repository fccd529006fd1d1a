"""An emulated run that moves to shorter pipelines: weights of one that stays, times of replicas."""

import statistics

import pytest
import torch
import torch.distributed.checkpoint as dcp
from elastic_scenarios import (
    N_STEPS,
    PHASES,
    PLANNED,
    THERE,
    losses_of_steps,
    per_step,
    rows_folder,
    rows_of_steps,
    scenario,
)
from launcher import asked_for, merged, run_scenarios
from matplotlib.figure import Figure
from torch.distributed.checkpoint import FileSystemReader

from tests.timelyfreeze.helpers.pipelines import simulate
from timelyfreeze.planning import plan_from_json
from timelyfreeze.plots.gallery import draw_predicted
from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.tables import MOVES, STEPS
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order

ORDERS = {"1F1B": one_f_one_b_order, "GPipe": gpipe_order}
CASES = ["1F1B", pytest.param("GPipe", marks=[pytest.mark.long])]

# Before the move, while times are measured again, and when the new plan is in force.
SAVED = [9, 11, 17]
# 7 layers are frozen after step 9, none after step 16.
THAWING = {
    **PLANNED,
    "freezing__method": "timelyfreeze+thawing",
    "freezing__thawing.check_interval": 5,
    "freezing__thawing.layers": 7,
    "training__steps": 22,
}

# The same, and frozen weights learn in subspaces, of the middle rank after so short a warm-up.
LEARNING = {**PLANNED, "freezing__gradient_rank": [2, 4, 8]}

# The shorter pipeline is cut within a block.
HALVES = {"freezing__elastic.sublayers": None, "freezing__elastic.frozen_cost": 0.05}

folder = rows_folder


@pytest.fixture(scope="module")
def runs(request, folder):
    emulated = {"emulation__enable": None, "metrics__enable_tensorboard": None}
    scenarios = [scenario(folder, "stays", is_elastic=False, **emulated)]
    for (schedule,) in asked_for(request, "schedule"):
        key = {"parallelism__pipeline_parallel_schedule": schedule}
        scenarios.append(scenario(folder, schedule, is_elastic=True, **emulated, **key))
    return run_scenarios(folder, 1, scenarios, script="elastic_run.py")


@pytest.fixture(scope="module")
def planned(request, folder):
    emulated = {"emulation__enable": None, "metrics__enable_tensorboard": None}
    halves = {**emulated, **HALVES}
    there = {**halves, **THERE, "freezing__elastic.enable": None}
    scenarios = [
        scenario(folder, "plans", is_elastic=True, save_at=SAVED, **halves, **PLANNED),
        scenario(folder, "plans there", is_elastic=False, front=7, **there),
        scenario(folder, "thaws", is_elastic=True, module="thawing_policy", **halves, **THAWING),
    ]
    learns = {**emulated, **LEARNING, "checkpoint__no_last_save_model_only": None}
    scenarios.append(scenario(folder, "learns", is_elastic=True, save_at=SAVED, **learns))
    settings = {"plans": {**halves, **PLANNED}, "learns": learns}
    for name, step in asked_for(request, "name", "step"):
        again, saved = f"{name} from {step}", f"planned/{name}/checkpoint/step-{step}"
        resumed = scenario(folder, again, is_elastic=True, resumes=saved, **settings[name])
        scenarios.append({**resumed, "after": name})
    return run_scenarios(folder / "planned", 1, scenarios, script="elastic_run.py")


def run_folder(folder, name):
    (only,) = (folder / name / "tb").iterdir()
    return only


def frozen_of_steps(ranks):
    return {step: set(found) for step, found in per_step(ranks, "frozen").items()}


@pytest.mark.parametrize("schedule", CASES)
def test_weights_are_those_of_a_run_that_stays(runs, schedule):
    for of_steps in (rows_of_steps, frozen_of_steps):
        assert of_steps(runs[schedule]) == of_steps(runs["stays"])
    expected = losses_of_steps(runs["stays"])
    assert losses_of_steps(runs[schedule]) == pytest.approx(expected, rel=1e-6)
    for key in ("weights", "moments"):
        want, have = merged(runs["stays"], key), merged(runs[schedule], key)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("schedule", CASES)
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


@pytest.mark.parametrize("schedule", CASES)
def test_every_batch_is_played_through_its_own_pipeline(runs, folder, schedule):
    (seen,) = runs[schedule]
    batches = iter(zip(seen["actions"], seen["virtual_ms"], strict=True))
    for step in STEPS.read(run_folder(folder, schedule)):
        # Ranks, microbatches of a replica, replicas.
        n_ranks, n, n_replicas = (4, 4, 1) if step.step < 7 else (2, 2, 2)
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


@pytest.mark.parametrize("schedule", CASES)
def test_nothing_of_a_former_pipeline_is_kept(runs, schedule):
    assert runs[schedule][0]["n_left_over"] == 0


def since(ranks, key, first):
    return {step: found for step, found in per_step(ranks, key).items() if step >= first}


def shapes(ranks):
    return [shape for _, *shape in ranks[0]["pipelines"]]


def test_with_a_plan_it_moves_once_the_plan_is_in_force_and_measures_anew(planned):
    """Four layers are frozen from step 5 on, for which it would move if it had no plan."""
    assert shapes(planned["plans"]) == [[4, 1, 8], [2, 1, 4]]
    assert planned["plans"][0]["halves"] == [False, True]
    phases = per_step(planned["plans"], "phases")
    assert [set(phases[step]) for step in sorted(phases)] == [{phase} for phase in PHASES]
    assert [len(phases[step]) for step in (9, 10)] == [1, 2]


def test_it_plans_and_freezes_as_if_it_had_begun_there(planned):
    (first, last), (there,) = planned["plans"][0]["plans"], planned["plans there"][0]["plans"]
    assert last == there
    assert len(first) > len(last)
    assert 0.0 < sum(last.values()) < len(last)
    masks = since(planned["plans"], "masks", 10)
    assert masks == since(planned["plans there"], "masks", 10)
    stable = [m for step in (16, 17, 18) for _, found in masks[step] for m in found.values()]
    assert any(any(mask) and not all(mask) for mask in stable)


@pytest.mark.parametrize("name", [pytest.param("plans", marks=[pytest.mark.long]), "learns"])
@pytest.mark.parametrize("step", SAVED)
def test_a_planned_run_that_is_resumed_learns_the_same(planned, name, step):
    whole, resumed = planned[name], planned[f"{name} from {step}"]
    assert shapes(resumed) == [[4, 1, 8], [2, 1, 4]]
    assert resumed[0]["plans"][-1] == whole[0]["plans"][-1]
    for key in ("phases", "masks", "losses", "rows"):
        assert per_step(resumed, key) == since(whole, key, step + 1), key
    for key in ("weights", "moments"):
        want, have = merged(whole, key), merged(resumed, key)
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def subspaces_at(folder, step):
    at = folder / "planned/learns/checkpoint" / f"step-{step}"
    saved = FileSystemReader(at).read_metadata().state_dict_metadata
    bases = {
        name: torch.zeros(entry.size) for name, entry in saved.items() if "subspace.basis" in name
    }
    dcp.load(bases, checkpoint_id=at, no_dist=True)
    return bases


@pytest.mark.usefixtures("planned")
def test_subspaces_go_along(folder):
    """In two steps half of the weights turn, each in a step of its own; the others' stay."""
    before, after = (subspaces_at(folder, step) for step in SAVED[:2])
    assert before.keys() == after.keys()
    stayed = [name for name in before if torch.equal(before[name], after[name])]
    assert 0 < len(stayed) < len(before)
    for bases in (before, after):
        ranks = {int(basis.any(dim=0).sum()) for basis in bases.values()}
        assert ranks == {4}, "of 8 places"


def test_unfrozen_it_plans_once_more_for_the_pipeline_of_the_start(planned):
    assert shapes(planned["thaws"]) == [[4, 1, 8], [2, 1, 4], [4, 1, 8]]
    first, shorter, last = planned["thaws"][0]["plans"]
    assert first == last
    assert first == planned["plans"][0]["plans"][0]
    assert shorter == planned["plans"][0]["plans"][1]


def test_plans_of_former_pipelines_are_numbered(planned, folder):
    written = run_folder(folder / "planned", "plans")
    plans = [plan_from_json((written / name).read_text()) for name in ("plan_1.json", "plan.json")]
    found = [dict(zip(map(str, p.actions), p.ratios.tolist(), strict=True)) for p in plans]
    assert found == planned["plans"][0]["plans"]
    assert (written / "bounds_1.json").exists()
    summary = read_summary(written)
    assert summary.batch_ms_predicted == plans[1].batch_ms
    assert summary.failure is None
    assert isinstance(draw_predicted(written), Figure)
