"""Sampled tokens in whole runs: on every schedule, and resumed in every phase bit for bit.

The ranks are emulated, but for replicas and shards.
"""

import math

import pytest
import torch
from launcher import EMULATED, SCHEDULES, arguments, asked_for, merged, run_scenarios
from methods import PHASES, STEPS

CAP = 0.4
THOROUGH = ("1F1B", "ZBVZeroBubble")
# Steps to resume after: variance measured, upper and lower bound, solved, ramp, stable.
PLACES = (2, 3, 5, 6, 8, 11)
KINDS = {
    "cap": {"freezing__max_freeze_ratio": CAP},
    "inputs": {"freezing__max_freeze_ratio": CAP, "freezing__sample_input_gradients": 0.5},
    "auto": {"freezing__max_freeze_ratio": "auto", "freezing__replan_every": 2},
    "accumulated": {"freezing__max_freeze_ratio": CAP, "training__global_batch_size": 16},
}
BATCHES_A_STEP = {"accumulated": 2}
SHARDED = {"parallelism__data_parallel_shard_degree": 2}
# Processes and keys of what splits or repeats the stages.
SPREAD = {
    "FSDP bf16": (4, {**SHARDED, "training__mixed_precision_param": "bfloat16"}),
    "HSDP": (8, {**SHARDED, "parallelism__data_parallel_replicate_degree": 2}),
    "recomputed": (2, {"activation_checkpoint__mode": "full"}),
}


def freezing_arguments(kind, schedule, **more):
    return arguments(
        model__flavor="tiny",
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_microbatch_size=2,
        parallelism__pipeline_parallel_schedule=schedule,
        training__steps=STEPS,
        checkpoint__enable=None,
        checkpoint__keep_latest_k=0,
        checkpoint__no_last_save_model_only=None,
        freezing__method="timelyfreeze",
        freezing__unit="tokens",
        **PHASES,
        **KINDS[kind],
        **more,
    )


def cases(*, resumed):
    """Return what is tried; long but for the kinds on one schedule, two of them on another."""
    found = []
    for kind in KINDS:
        for schedule in THOROUGH if resumed or kind != "cap" else SCHEDULES:
            places = PLACES if kind == "auto" else [6]
            for place in places if resumed else [None]:
                is_short = schedule == "ZBVZeroBubble" and place in (None, 2, 6, 8)
                is_short |= schedule == "1F1B" and kind in ("cap", "auto") and place is None
                marks = [] if is_short else [pytest.mark.long]
                values = (kind, schedule, place) if resumed else (kind, schedule)
                found.append(pytest.param(*values, marks=marks))
    return found


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    scenarios = []
    places = {}
    for kind, schedule, place in asked_for(request, "kind", "schedule", "place"):
        places.setdefault((kind, schedule), []).append(place)
    for kind, schedule in asked_for(request, "kind", "schedule"):
        whole = {
            "name": f"{kind} {schedule}",
            "fake_clock": True,
            "save_at": places.get((kind, schedule), []),
            "args": freezing_arguments(kind, schedule, **EMULATED),
        }
        scenarios.append(whole)
        for step in whole["save_at"]:
            resumed = freezing_arguments(
                kind,
                schedule,
                checkpoint__initial_load_path=folder
                / whole["name"]
                / "checkpoint"
                / f"step-{step}",
                checkpoint__no_initial_load_model_only=None,
                checkpoint__load_only=None,
                **EMULATED,
            )
            more = {"fixed_weights": False, "save_at": [], "args": resumed, "after": whole["name"]}
            scenarios.append({**whole, **more, "name": f"{whole['name']} from {step}"})
    return run_scenarios(folder, 1, scenarios, timeout_s=600)


@pytest.mark.parametrize(("kind", "schedule"), cases(resumed=False))
def test_a_run_learns_in_every_step_and_samples_what_is_planned(runs, kind, schedule):
    check_sampled(runs[f"{kind} {schedule}"], kind)


@pytest.mark.parametrize(
    "spread",
    [pytest.param(s, marks=[] if s == "FSDP bf16" else [pytest.mark.long]) for s in SPREAD],
)
def test_replicas_and_shards_sample_alike(tmp_path, spread):
    n_processes, keys = SPREAD[spread]
    scenario = {
        "name": spread,
        "fake_clock": True,
        "args": freezing_arguments("cap", "1F1B", **keys),
    }
    ranks = run_scenarios(tmp_path, n_processes, [scenario], timeout_s=400)[spread]
    check_sampled(ranks, "cap")
    copies = {}
    for seen in ranks:
        for name, weight in seen["weights"].items():
            copies.setdefault(name, []).append(weight)
    for same in copies.values():
        assert len(same) == n_processes // 2
        assert all(torch.equal(weight, same[0]) for weight in same)


def check_sampled(ranks, kind):
    losses = next(seen["losses"] for seen in ranks if seen["losses"][0] != -1.0)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert not any(any(mask) for seen in ranks for _, _, m in seen["masks"] for mask in m.values())
    plan = ranks[0]["plan"]
    if kind != "auto":
        assert max(plan.values()) == pytest.approx(CAP)
    for seen in ranks:
        applied = {(step, stage): ratios for step, stage, ratios in seen["applied"]}
        for (step, stage), ratios in applied.items():
            if step <= 4:
                assert set(ratios.values()) == {0.0}
            elif step in (5, 6):
                assert len(set(ratios.values())) == 1
                assert min(ratios.values()) >= CAP
            elif kind == "auto" and step > 9 and step % 2 == 1:
                assert set(ratios.values()) == {0.0}, "its batch measures noise again"
            elif step > 9 and ranks[0]["switched_off"] is None:
                wanted = {
                    m: plan[next(a for a in (f"{stage}B{m}", f"{stage}W{m}") if a in plan)]
                    for m in ratios
                }
                assert ratios == pytest.approx(wanted)
    gradients = merged(ranks, "gradients")
    assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize(("kind", "schedule", "place"), cases(resumed=True))
def test_a_resumed_run_draws_the_same_tokens(runs, kind, schedule, place):
    name = f"{kind} {schedule}"
    for a, b in zip(runs[name], runs[f"{name} from {place}"], strict=True):
        assert b["losses"] == a["losses"][-BATCHES_A_STEP.get(kind, 1) * (STEPS - place) :]
        assert b["grad_norms"] == a["grad_norms"][-(STEPS - place) :]
        assert b["applied"] == [each for each in a["applied"] if each[0] > place]
        assert b.get("plan") == a.get("plan")
        assert b["average_freeze_ratio"] == a["average_freeze_ratio"]
    left = merged(runs[f"{name} from {place}"], "weights")
    right = merged(runs[name], "weights")
    assert [key for key in right if not torch.equal(left[key], right[key])] == []
