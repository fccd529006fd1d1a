"""Frozen weights that learn in a subspace, in whole runs: what is frozen, resumed, and real ranks.

The ranks are emulated, but for one run with which they are compared.
"""

import math

import pytest
import torch
from launcher import (
    EMULATED,
    SCHEDULES,
    arguments,
    asked_for,
    assert_goes_on,
    merged,
    run_scenarios,
)
from methods import PHASES, STEPS
from saving import SAVED, resumed_from

RANKS, CAP = [4, 8, 16], 0.75
SHORT = "ZBVZeroBubble"
CASES = [pytest.param(s, marks=[] if s == SHORT else [pytest.mark.long]) for s in SCHEDULES]
# Steps to resume after: warm-up, the choice of a rank as it ends, lower bound, ramp.
PLACES = (2, 3, 6, 9)
STOPS = [
    pytest.param(s, p, marks=[] if s == SHORT and p in (3, 9) else [pytest.mark.long])
    for s in ("1F1B", SHORT)
    for p in PLACES
]


def scenario(name, schedule, *, emulated=True, **more):
    settings = {
        "model__flavor": "short",
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 2,
        "parallelism__pipeline_parallel_schedule": schedule,
        "training__steps": STEPS,
        "training__global_batch_size": 16,
        **SAVED,
        "freezing__method": "timelyfreeze",
        **PHASES,
        "freezing__last_warmup_step": 3,
        "freezing__last_monitor_step": 7,
        "freezing__last_ramp_step": 10,
        "freezing__gradient_rank": RANKS,
        "freezing__max_freeze_ratio": CAP,
        **(EMULATED if emulated else {}),
        **more,
    }
    return {"name": name, "fake_clock": True, "save_at": [], "args": arguments(**settings)}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("low_rank")
    stops = asked_for(request, "schedule", "place")
    scenarios = []
    for (schedule,) in asked_for(request, "schedule"):
        places = [place for stopped, place in stops if stopped == schedule]
        scenarios.append({**scenario(schedule, schedule), "save_at": places})
        for place in places:
            going_on = scenario(
                f"{schedule} from {place}",
                schedule,
                **resumed_from(folder / schedule / "checkpoint" / f"step-{place}"),
            )
            scenarios.append({**going_on, "fixed_weights": False, "after": schedule})
    return run_scenarios(folder, 1, scenarios, timeout_s=600)


def frozen_names(seen, step):
    """{microbatch: names of what it freezes}, of all passes of a step."""
    found = {}
    for at, stage, masks in seen["masks"]:
        for microbatch, mask in masks.items() if at == step else ():
            names = [n for n, f in zip(seen["names"][stage], mask, strict=True) if f]
            found.setdefault(microbatch, set()).update(names)
    return found


@pytest.mark.parametrize("schedule", CASES)
def test_linear_weights_alone_are_frozen_and_all_learn_in_every_step(runs, schedule):
    (seen,) = runs[schedule]
    assert all(map(math.isfinite, seen["losses"]))
    assert seen["losses"][-1] < seen["losses"][0]
    linear = {n for names in seen["names"].values() for n in names if is_linear(n)}
    assert {4, 5}.isdisjoint(step for step, _, masks in seen["masks"] if masks)
    for step in (6, 7):
        assert all(names == linear for names in frozen_names(seen, step).values())
    assert 0.0 < max(seen["plan"].values()) <= 1.0
    assert set.union(*frozen_names(seen, STEPS).values()) <= linear
    assert all(gradient is not None for gradient in seen["gradients"].values())
    norms = dict(seen["grad_norms"])
    assert all(norms[step] > 0.0 for step in (6, 7)), "monitoring learns too"


def is_linear(name):
    return name.endswith("weight") and "norm" not in name and "embeddings" not in name


@pytest.mark.parametrize(("schedule", "place"), STOPS)
def test_a_resumed_run_equals_the_undisturbed_one(runs, schedule, place):
    assert_goes_on(runs[schedule], runs[f"{schedule} from {place}"], place)


@pytest.mark.long
def test_real_ranks_learn_the_same(runs, tmp_path):
    real = run_scenarios(tmp_path, 2, [scenario("real", SHORT, emulated=False)])["real"]
    (alone,) = runs[SHORT]
    assert [seen["plan"] for seen in real] == [alone["plan"]] * 2
    weights = merged(real, "weights")
    assert [n for n in weights if not torch.equal(weights[n], alone["weights"][n])] == []
