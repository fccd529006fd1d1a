"""Clocks that misread and a rank that is slow: all ranks do the same, and go on.

One clock of each rank misreads between real ranks, the others between emulated ones.
What a single controller makes of such times is in ``tests/timelyfreeze/timing/test_bad_times.py``.
"""

import json
import math

import pytest
from launcher import EMULATED, arguments, asked_for, run_scenarios

STEPS = 16
# Steps 1-2 are warm-up, 3-8 monitoring, 9-10 ramp; times are compared at 13 and 16.
SETTINGS = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "training__steps": STEPS,
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 2,
    "freezing__last_monitor_step": 8,
    "freezing__last_ramp_step": 10,
    "freezing__discard_batches": 0,
    "freezing__replan_every": 3,
}
# An action of the second rank, and of the first: neither may freeze by times that the other lacks.
ACTIONS = {"NaN": ("1B2", math.nan), "infinite": ("0F1", math.inf), "negative": ("1F0", -1.0)}
ACTIONS["missing"] = ("0B3", None)
REAL = ("NaN",)
# What a controller makes of each is in the file that is named above.
LONG = ("infinite", "negative")
CASES = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in ACTIONS]


def scenario(name, misreads=None, *, emulated=True, **more):
    machine = {"misreads": misreads or {}, "spans": True}
    args = arguments(**SETTINGS, **(EMULATED if emulated else {}))
    return {"name": name, "fake_clock": True, "machine": machine, "args": args, **more}


def in_steps(first, last, action, time_ms):
    return {str(step): {action: time_ms} for step in range(first, last + 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bad_clocks")


@pytest.fixture(scope="module")
def runs(request, folder):
    scenarios = [scenario("none"), scenario("jump", in_steps(4, 4, "1B2", 3.6e6))]
    for (name,) in asked_for(request, "name"):
        action, time_ms = ACTIONS[name]
        emulated = name not in REAL
        scenarios += [
            scenario(f"{name} early", in_steps(3, 8, action, time_ms), emulated=emulated),
            scenario(f"{name} later", in_steps(13, 13, action, time_ms), emulated=emulated),
        ]
    of_real = [one for one in scenarios if one["name"].split()[0] in REAL]
    # Its methods stay changed, so this one comes last.
    slow = scenario("slow", emulated=False, fake_clock=False, module="slow_rank")
    seen = run_scenarios(folder, 1, [one for one in scenarios if one not in of_real])
    return seen | run_scenarios(folder, 2, [*of_real, slow])


def masks(ranks, step):
    return [
        mask
        for seen in ranks
        for at, _, by_microbatch in seen["masks"]
        if at == step
        for mask in by_microbatch.values()
    ]


@pytest.mark.parametrize("name", CASES)
def test_without_times_nothing_is_frozen_on_any_rank(runs, name):
    ranks = runs[f"{name} early"]
    assert all(seen["step"] == STEPS for seen in ranks)
    assert not any("plan" in seen for seen in ranks)
    assert not any(any(mask) for step in range(9, STEPS + 1) for mask in masks(ranks, step))
    (message,) = [message for seen in ranks for message in seen["warnings"]]
    assert message.startswith("Nothing is frozen: step 9")


@pytest.mark.parametrize("name", CASES)
def test_a_bad_time_later_leaves_the_plan_in_force(runs, name):
    ranks, undisturbed = runs[f"{name} later"], runs["none"]
    assert all(seen["plan"] == undisturbed[0]["plan"] for seen in ranks)
    assert sorted(masks(ranks, STEPS)) == sorted(masks(undisturbed, STEPS))
    assert any(any(mask) for mask in masks(ranks, STEPS))
    messages = [message for seen in ranks for message in seen["warnings"]]
    told = [message for message in messages if not message.startswith("Freezing does not pay")]
    assert len(told) == (name != "missing")
    assert all("a clock misread in step 13" in message for message in told)


def test_a_jump_by_an_hour_changes_no_plan(runs):
    left, right = runs["jump"][0]["plan"], runs["none"][0]["plan"]
    assert left == pytest.approx(right, abs=0.05)


def test_a_rank_that_is_ten_times_slower_is_planned_for(folder, runs):
    """Measured by the real clock."""
    ranks = runs["slow"]
    assert all(seen["step"] == STEPS for seen in ranks)
    assert ranks[0]["plan"] == ranks[1]["plan"]
    (run_folder,) = (folder / "slow" / "tb").iterdir()
    bounds = json.loads((run_folder / "bounds.json").read_text())["bounds"]
    # 20 ms at least, of which beside other work a part is not the rank's own.
    assert all(times["max_ms"] >= 10.0 for name, times in bounds.items() if name[0] == "1")
