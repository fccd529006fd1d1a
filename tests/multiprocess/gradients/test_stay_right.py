"""Monitoring while learning, plans that come later or again, freezing switched off.

Measured times are replaced by those of a machine whose stage 1 becomes slower, or on which freezing
stops saving anything. Everything happens at the same step in one process that emulates all ranks,
in a run that was stopped, and on real ranks.
"""

import pytest
import torch
from launcher import EMULATED, arguments, asked_for, assert_goes_on, merged, run_scenarios
from methods import ROW
from saving import SAVED, resumed_from

STEPS = 16
# Steps 1-2 are warm-up, 3-6 monitoring, 7-9 ramp; times are compared at 12 and 15.
COMMON = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "training__steps": STEPS,
    "training__max_norm": 0.5,
    "freezing__replan_every": 3,
}
# A resumed run leaves out its first batches, so that the two would not compare the same ones.
SEEN_WHOLE = {"freezing__discard_batches": 0}
SLOWER = {"slow_stage": 1, "slow_from": 11, "factor": 2.0}
IN_VAIN = {"saves_until": 9, "spans": True}
# With full and with split backwards. A hybrid, and freezing in vain, have the former.
SCHEDULES = [pytest.param("1F1B", marks=[pytest.mark.long]), "ZBVZeroBubble"]
PLACES = {
    "mixed monitoring": 4,
    "before the plan": 6,
    "stable": 10,
    "before the plan again": 12,
    "again": 13,
}


def scenario(name, schedule, *, method="timelyfreeze", machine=None, emulated=True, **settings):
    settings = {
        **COMMON,
        **ROW[method].arguments,
        **SEEN_WHOLE,
        "parallelism__pipeline_parallel_schedule": schedule,
        **settings,
        **(EMULATED if emulated else {}),
    }
    return {
        "name": name,
        "fake_clock": True,
        "machine": machine or {},
        "args": arguments(**settings),
    }


def mixed(schedule, folder=None, step=None, **more):
    """A run with mixed monitoring, plans made meanwhile, and a stage that becomes slower."""
    resumed = resumed_from(folder and folder / "checkpoint" / f"step-{step}")
    return scenario(
        f"mixed {schedule}" + (f" from {step}" if step else ""),
        schedule,
        machine=SLOWER,
        freezing__monitoring="mixed",
        freezing__solver_delay_steps=1,
        **SAVED,
        **(resumed if step else {}),
        **more,
    )


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stay_right")
    scenarios = []
    stops = asked_for(request, "schedule", "place")
    for (schedule,) in asked_for(request, "schedule"):
        steps = [PLACES[place] for stopped, place in stops if stopped == schedule]
        whole = {**mixed(schedule), "save_at": steps}
        scenarios.append(whole)
        for step in steps:
            resumed = mixed(schedule, folder / whole["name"], step)
            more = {"fixed_weights": False, "save_at": [], "after": whole["name"]}
            scenarios.append({**resumed, **more})
        scenarios.append(scenario(f"halves {schedule}", schedule, machine=SLOWER))
    hybrid = {"method": "timelyfreeze+apf", "freezing__monitoring": "mixed"}
    scenarios += [
        scenario("hybrid", "1F1B", **hybrid),
        scenario("promises nothing", "1F1B", freezing__max_freeze_ratio=0.0),
    ]
    return run_scenarios(folder, 1, scenarios, timeout_s=400)


@pytest.fixture(scope="module")
def real(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stay_right_real")
    in_vain = {"machine": IN_VAIN, "freezing__min_gain": 0.1, "training__global_batch_size": 16}
    scenarios = [
        {**mixed(schedule, emulated=False), "save_at": []}
        for (schedule,) in asked_for(request, "schedule")
    ]
    scenarios.append(scenario("in vain", "1F1B", emulated=False, **in_vain))
    return run_scenarios(folder, 2, scenarios, timeout_s=200)


def frozen(ranks, step):
    """The masks of a step on all ranks, by stage and microbatch: one for each pass."""
    together = {}
    for seen in ranks:
        for at, stage, masks in seen["masks"]:
            if at == step:
                for microbatch in range(4):
                    mask = masks.get(microbatch, [False])
                    together.setdefault((stage, microbatch), []).append(mask)
    return together


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step_of_mixed_monitoring_learns(runs, schedule):
    ranks = runs[f"mixed {schedule}"]
    norms = dict(ranks[0]["grad_norms"])
    for step in range(3, 7):
        batches = frozen(ranks, step)
        for masks in batches.values():
            assert all(all(mask) or not any(mask) for mask in masks), "whole or not at all"
        live = {stage for (stage, _), masks in batches.items() if not all(map(all, masks))}
        assert live == {stage for stage, _ in batches}, "in every stage"
        n_frozen = sum(all(mask) for masks in batches.values() for mask in masks)
        assert 2 * n_frozen == sum(len(masks) for masks in batches.values())
        assert norms[step] > 0.0
    paper = dict(runs[f"halves {schedule}"][0]["grad_norms"])
    assert paper[5] == paper[6] == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_come_late_and_anew(runs, schedule):
    ranks = runs[f"mixed {schedule}"]
    assert not any(any(m) for masks in frozen(ranks, 7).values() for m in masks), "not solved yet"
    assert any(any(m) for masks in frozen(ranks, 8).values() for m in masks)
    assert ranks[0]["plan_files"] == ["plan.json", "plan_1.json"]
    # The last plan is for what the machine was in the end: that of a run in halves.
    paper = runs[f"halves {schedule}"]
    assert ranks[0]["plan"] == pytest.approx(paper[0]["plan"], abs=0.05)
    assert ranks[0]["switched_off"] is None


SHORT = {
    ("ZBVZeroBubble", "mixed monitoring"),
    ("ZBVZeroBubble", "before the plan again"),
    ("ZBVZeroBubble", "again"),
}
STOPS = [
    pytest.param(
        schedule,
        place,
        marks=[] if (schedule, place) in SHORT else [pytest.mark.long],
    )
    for schedule in ("1F1B", "ZBVZeroBubble")
    for place in PLACES
]


@pytest.mark.parametrize(("schedule", "place"), STOPS)
def test_a_run_that_was_stopped_equals_one_that_was_not(runs, schedule, place):
    stopped_at = PLACES[place]
    whole, resumed = runs[f"mixed {schedule}"], runs[f"mixed {schedule} from {stopped_at}"]
    assert_goes_on(whole, resumed, stopped_at)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_real_ranks_do_the_same(runs, real, schedule):
    (alone,), whole = runs[f"mixed {schedule}"], real[f"mixed {schedule}"]
    assert [seen["plan"] for seen in whole] == [alone["plan"]] * 2
    assert [seen["switched_off"] for seen in whole] == [None, None]
    assert alone["plan_files"] == whole[0]["plan_files"]
    together = sorted((m for seen in whole for m in seen["masks"]), key=lambda m: m[:2])
    assert sorted(alone["masks"], key=lambda m: m[:2]) == together
    weights = merged(whole, "weights")
    assert [n for n in weights if not torch.equal(weights[n], alone["weights"][n])] == []


def test_a_hybrid_monitors_and_goes_on_to_choose(runs):
    ranks = runs["hybrid"]
    for step in range(3, 7):
        masks = [m for masks in frozen(ranks, step).values() for m in masks]
        assert all(all(m) or not any(m) for m in masks)
    stable = [m for masks in frozen(ranks, 11).values() for m in masks]
    assert any(any(m) and not all(m) for m in stable)
    steps = [step for step, _ in ranks[0]["decided"]]
    assert set(steps) == set(range(1, STEPS + 1))


def test_freezing_in_vain_is_switched_off_on_all_ranks(real):
    ranks = real["in vain"]
    assert ranks[0]["switched_off"] == ranks[1]["switched_off"]
    assert ranks[0]["switched_off"].startswith("from step 16 on: the measured gain is +")
    assert any(any(m) for masks in frozen(ranks, 15).values() for m in masks)
    assert not any(any(m) for masks in frozen(ranks, 16).values() for m in masks)


def test_a_plan_that_promises_nothing_is_not_followed(runs):
    ranks = runs["promises nothing"]
    assert all("the plan promises +0.0%" in seen["switched_off"] for seen in ranks)
    for step in range(7, STEPS + 1):
        assert not any(any(m) for masks in frozen(ranks, step).values() for m in masks)
