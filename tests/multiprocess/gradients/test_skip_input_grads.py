"""Backwards that nobody needs are left out, and nothing else changes.

The ranks are emulated; ``test_emulation.py`` leaves them out between real ones.
"""

import re

import pytest
import torch
from launcher import EMULATED, SCHEDULES, arguments, asked_for, merged, run_scenarios

STEPS = 12
SKIP_INPUT_GRADS = ("off", "use")
SHORT = ("1F1B", "ZBVZeroBubble")
CASES = [
    pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in SCHEDULES
]


def settings(schedule, skip_input_grads):
    return arguments(
        model__flavor="tiny",
        parallelism__pipeline_parallel_schedule=schedule,
        training__steps=STEPS,
        freezing__method="timelyfreeze",
        freezing__last_warmup_step=2,
        freezing__last_monitor_step=6,
        # Without a ramp, both kinds of runs draw the same masks.
        freezing__last_ramp_step=7,
        freezing__max_freeze_ratio=0.8,
        freezing__discard_batches=1,
        freezing__skip_input_grads=skip_input_grads,
        **EMULATED,
    )


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    scenarios = [
        {
            "name": f"{skip_input_grads} {schedule}",
            "fake_clock": True,
            "args": settings(schedule, skip_input_grads),
        }
        for (schedule,) in dict.fromkeys([*asked_for(request, "schedule"), *[(s,) for s in SHORT]])
        for skip_input_grads in SKIP_INPUT_GRADS
    ]
    return run_scenarios(tmp_path_factory.mktemp("skip_input_grads"), 1, scenarios, timeout_s=900)


def frozen_whole(ranks):
    """{(step, microbatch): stages that are frozen whole}, of the steps that follow the plan."""
    found = {}
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            for microbatch, mask in masks.items():
                if step > 6 and all(mask):
                    found.setdefault((step, microbatch), set()).add(stage)
    return found


def cut(ranks):
    """{(step, stage): microbatches without input gradients}."""
    return {
        (step, stage): set(microbatches)
        for seen in ranks
        for step, stage, microbatches in seen["cut"]
    }


@pytest.mark.parametrize("schedule", CASES)
def test_leaving_out_what_nobody_needs_changes_nothing(runs, schedule):
    off, use = runs[f"off {schedule}"], runs[f"use {schedule}"]
    for without, with_it in zip(off, use, strict=True):
        assert with_it["losses"] == without["losses"]
        assert with_it["grad_norms"] == without["grad_norms"]
        assert with_it["masks"] == without["masks"]
        assert with_it["plan"] == without["plan"]
    for key in ("gradients", "weights"):
        left, right = merged(off, key), merged(use, key)
        for name, tensor in left.items():
            same = right[name] is None if tensor is None else torch.equal(right[name], tensor)
            assert same, f"{key} of {name}"
    assert not any(cut(off).values())


@pytest.mark.parametrize("schedule", CASES)
def test_all_ranks_leave_out_the_same_fronts(runs, schedule):
    """A stage is told of a microbatch exactly if the plan freezes it and all in front whole."""
    ranks = runs[f"use {schedule}"]
    planned = {}
    for action, ratio in ranks[0]["plan"].items():
        stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z])(\d+)", action).groups()
        if kind in "BW" and ratio == 1.0:
            planned.setdefault(int(microbatch), set()).add(int(stage))
    whole = frozen_whole(ranks)
    for (step, stage), microbatches in cut(ranks).items():
        front = set(range(stage + 1))
        wanted = {m for m, stages in planned.items() if front <= stages} if step > 6 else set()
        assert microbatches == wanted
        assert all(front <= whole[step, m] for m in microbatches)


def test_fronts_come_about_by_themselves_too(runs):
    """Otherwise the first test would compare runs in which nothing is left out."""
    assert any(
        stage > 0 and microbatches
        for schedule in SHORT
        for (_, stage), microbatches in cut(runs[f"use {schedule}"]).items()
    )
