"""A pipeline emulated in one process equals, bit for bit, one with a process for each rank.

Durations are the one input that cannot repeat, so the recorder's times are replaced by fixed ones.
Gradients are clipped, so a norm that differs in its last bit would show in all weights.
"""

import json
from pathlib import Path

import pytest
import torch
from emulations import PLACES, compared, resumes, saves, scenario
from launcher import asked_for, merged, run_scenarios
from methods import STEPS

from tests.timelyfreeze.helpers.pipelines import eager_order
from timelyfreeze.records.summary import read_summary
from timelyfreeze.schedule.order import order_from_csv, order_to_csv

RESUMED = ["timelyfreeze", "timelyfreeze+apf", "autofreeze", "egeria"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "ahead.csv").write_text(order_to_csv(eager_order()))
    return folder


def asked_names(request, n_ranks):
    """Names of ``compared`` that a test will look at."""
    known = compared(n_ranks, Path())
    return [name for (name,) in asked_for(request, "name") if name in known]


def asked_places(request):
    """{method: places} of runs that go on in the other form."""
    asked = {}
    for method, place in asked_for(request, "method", "place"):
        asked.setdefault(method, []).append(place)
    return asked


@pytest.fixture(scope="module")
def real(request, folder):
    """Runs with a process for each rank."""
    seen = {}
    for n_ranks in (2, 4):
        runs = compared(n_ranks, folder)
        names = asked_names(request, n_ranks)
        scenarios = [scenario(name, runs[name][0], **runs[name][1]) for name in names]
        if n_ranks == 2:
            scenarios += [saves(method) for method in asked_places(request)]
        seen |= run_scenarios(folder / "real", n_ranks, scenarios, timeout_s=900)
    return seen


@pytest.fixture(scope="module")
def emulated(request, folder, real):
    """The same runs in one process, and runs that go on from checkpoints of the others."""
    scenarios = []
    for n_ranks in (2, 4):
        runs = compared(n_ranks, folder)
        scenarios += [
            scenario(name, runs[name][0], emulated=True, **runs[name][1])
            for name in asked_names(request, n_ranks)
        ]
    asked = asked_places(request)
    scenarios += [saves(method, emulated=True) for method in asked]
    scenarios += [
        resumes(method, place, folder / "real", emulated=True)
        for method, places in asked.items()
        for place in places
    ]
    return run_scenarios(folder / "emulated", 1, scenarios, timeout_s=1500)


@pytest.fixture(scope="module")
def resumed(request, folder, emulated):
    """Runs with a process for each rank that go on from checkpoints of emulated ones."""
    scenarios = [
        resumes(method, place, folder / "emulated")
        for method, places in asked_places(request).items()
        for place in places
    ]
    return run_scenarios(folder / "resumed", 2, scenarios, timeout_s=900)


def losses_of(ranks):
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    return losses


def by_stage(ranks, key, after=0):
    """Lists of (step, what happened) for each stage."""
    together = {}
    for seen in ranks:
        for step, stage, what in seen[key]:
            if step > after:
                together.setdefault(stage, []).append((step, what))
    return together


def assert_same(one, ranks, after=0):
    """Everything that a run computes is the same; ``after`` is the step of a stop."""
    (seen,) = one
    losses = losses_of(ranks)
    steps, batches = STEPS - after, min(len(seen["losses"]), len(losses))
    assert batches in (steps, 2 * steps)
    assert seen["losses"][-batches:] == losses[-batches:]
    assert seen["grad_norms"][-steps:] == ranks[0]["grad_norms"][-steps:]
    assert all(map(torch.equal, seen["batches"][-batches:], ranks[0]["batches"][-batches:]))
    assert by_stage(one, "masks", after) == by_stage(ranks, "masks", after)
    assert by_stage(one, "applied", after) == by_stage(ranks, "applied", after)
    assert [d for d in seen["decided"] if d[0] > after] == [
        d for d in ranks[0]["decided"] if d[0] > after
    ]
    assert seen.get("plan") == ranks[0].get("plan")
    for key in ("gradients", "weights"):
        left, right = seen[key], merged(ranks, key)
        assert left.keys() == right.keys()
        for name, tensor in right.items():
            same = left[name] is None if tensor is None else torch.equal(left[name], tensor)
            assert same, f"{key} of {name}"


# Each kind of schedule, no method, one that exchanges scores, and what those do not show. Egeria
# goes on in the other form.
SHORT = {"csv", "skipped", "validation ZBVZeroBubble", "2 pipetransformer 1F1B", "2 none 1F1B"}
SHORT |= {f"2 timelyfreeze {schedule}" for schedule in ("Interleaved1F1B", "DualPipeV")}


def names(*n_ranks, but=" of all "):
    return [
        pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long])
        for n in n_ranks
        for name in compared(n, Path())
        if but not in f" {name} "
    ]


def places():
    return [
        pytest.param(
            method,
            place,
            marks=[]
            if place == "ramp" and method in ("timelyfreeze+apf", "egeria")
            else [pytest.mark.long],
        )
        for method in RESUMED
        for place in PLACES
    ]


@pytest.mark.parametrize("name", names(2, 4))
def test_an_emulated_run_equals_a_real_one(real, emulated, name):
    assert_same(emulated[name], real[name])


@pytest.mark.parametrize("name", names(4, but=" none "))
def test_the_runs_that_are_compared_freeze_and_clip(real, name):
    """Without this the test above could pass on runs that never froze or clipped anything."""
    masks = by_stage(real[name], "masks")
    stable = [m for rows in masks.values() for step, w in rows if step > 9 for m in w.values()]
    assert any(any(mask) for mask in stable)
    assert any(not all(mask) for mask in stable) or len(stable) < 4 * 8 * len(masks)
    norms = [norm for _, norm in real[name][0]["grad_norms"]]
    assert sum(norm > 0.5 for norm in norms) > STEPS // 2


@pytest.mark.parametrize("name", names(2, 4, but=" none "))
def test_every_ranks_actions_run_in_its_own_order(real, emulated, name):
    (seen,) = emulated[name]
    for rank in real[name]:
        held = {str(stage) for stage in rank["sizes"]}
        mine = [a for a in seen["executed"] if a.rstrip("0123456789")[:-1] in held]
        assert mine == rank["executed"]
    assert len(seen["executed"]) == sum(len(rank["executed"]) for rank in real[name])


# What a step takes besides its batches, and how they scatter, by the clock on the wall.
MEASURED = ("outside_ms", "interval_factor")


def run_folder(folder, name):
    (found,) = (folder / name / "tb").iterdir()
    return found


def files_of(folder, name):
    return {
        path.name: path.read_text()
        for path in run_folder(folder, name).iterdir()
        if path.is_file() and path.suffix != ".0"
    }


def planned(text):
    """What a bounds or plan file says of the pipeline and its actions; None of None."""
    if text is None:
        return None
    return {key: value for key, value in json.loads(text).items() if key not in MEASURED}


@pytest.mark.parametrize("name", names(2, 4, but=" none "))
def test_the_files_are_those_of_the_pipeline(folder, real, emulated, name):
    ours, theirs = files_of(folder / "emulated", name), files_of(folder / "real", name)
    assert ours.get("schedule.csv") == theirs.get("schedule.csv")
    for file in ("bounds.json", "plan.json"):
        assert planned(ours.get(file)) == planned(theirs.get(file)), file
    assert order_from_csv(ours["schedule.csv"]).n_ranks == len(real[name])
    summary, of_real = (
        read_summary(run_folder(folder / kind, name)) for kind in ("emulated", "real")
    )
    assert of_real.emulated_ranks is None
    assert summary.emulated_ranks == len(real[name])
    assert (summary.n_devices, summary.ranks_per_replica) == (1, 1)
    assert summary.schedule == of_real.schedule
    assert summary.planned_gain == of_real.planned_gain
    assert summary.average_freeze_ratio == pytest.approx(of_real.average_freeze_ratio)
    assert summary.stage_ratios == of_real.stage_ratios
    assert summary.last_loss == of_real.last_loss
    assert summary.validation_loss == of_real.validation_loss
    assert summary.step_ms > summary.virtual_step_ms > 0
    assert summary.virtual_tokens_per_second > 0
    assert summary.real_batch_ms > 0


@pytest.mark.parametrize("name", [n for n in names(2, 4) if " none " in n.values[0]])
def test_a_run_without_freezing_is_timed_too(folder, emulated, name):
    summary = read_summary(run_folder(folder / "emulated", name))
    assert summary.emulated_ranks == int(name[0])
    assert summary.real_batch_ms > summary.batch_ms > 0
    assert summary.step_ms > summary.virtual_step_ms > summary.batch_ms


@pytest.mark.parametrize("name", [n for n in names(2) if n.values[0].startswith("validation")])
def test_the_validation_that_is_compared_took_place(folder, emulated, name):
    files = files_of(folder / "emulated", name)
    assert 0 < json.loads(files["summary.json"])["validation_loss"] < 10


@pytest.mark.parametrize(("method", "place"), places())
def test_a_real_run_goes_on_emulated(real, emulated, method, place):
    assert_same(emulated[f"{method} from {place}"], real[f"saves {method}"], PLACES[place])


@pytest.mark.parametrize(("method", "place"), places())
def test_an_emulated_run_goes_on_with_a_process_for_each_rank(emulated, resumed, method, place):
    assert_same(emulated[f"saves {method}"], resumed[f"{method} from {place}"], PLACES[place])
