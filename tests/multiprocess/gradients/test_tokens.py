"""Sampled tokens in whole runs: on every schedule, and resumed in every phase bit for bit."""

import math

import pytest
import torch
from launcher import SCHEDULES, arguments, merged, run_scenarios
from methods import PHASES, STEPS

CAP = 0.4
THOROUGH = ("1F1B", "ZBVZeroBubble")
# The variance that a cap is chosen by is measured in step 2, the last of the warm-up.
PLACES = {"variance": 2, "upper bound": 3, "lower bound": 5, "solved": 6, "ramp": 8, "stable": 11}
KINDS = {
    "cap": {"freezing__max_freeze_ratio": CAP},
    "inputs": {"freezing__max_freeze_ratio": CAP, "freezing__sample_input_gradients": 0.5},
    "auto": {"freezing__max_freeze_ratio": "auto"},
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    scenarios = []
    for kind in KINDS:
        for schedule in SCHEDULES if kind == "cap" else THOROUGH:
            whole = {
                "name": f"{kind} {schedule}",
                "fake_clock": True,
                "save_at": sorted(PLACES.values()) if schedule in THOROUGH else [],
                "args": freezing_arguments(kind, schedule),
            }
            scenarios.append(whole)
            for step in whole["save_at"] if kind == "auto" else whole["save_at"][3:4]:
                resumed = freezing_arguments(
                    kind,
                    schedule,
                    checkpoint__initial_load_path=folder
                    / whole["name"]
                    / "checkpoint"
                    / f"step-{step}",
                    checkpoint__no_initial_load_model_only=None,
                    checkpoint__load_only=None,
                )
                more = {"fixed_weights": False, "save_at": [], "args": resumed}
                scenarios.append({**whole, **more, "name": f"{whole['name']} from {step}"})
    return run_scenarios(folder, 2, scenarios, timeout_s=600)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [(kind, schedule) for kind in KINDS for schedule in (SCHEDULES if kind == "cap" else THOROUGH)],
)
def test_a_run_learns_in_every_step_and_samples_what_is_planned(runs, kind, schedule):
    ranks = runs[f"{kind} {schedule}"]
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
            elif step > 9 and ranks[0]["switched_off"] is None:
                wanted = {
                    m: plan[next(a for a in (f"{stage}B{m}", f"{stage}W{m}") if a in plan)]
                    for m in ratios
                }
                assert ratios == pytest.approx(wanted)
    gradients = merged(ranks, "gradients")
    assert all(gradient is not None for gradient in gradients.values())


RESUMED = [
    (kind, schedule, step)
    for kind in KINDS
    for schedule in THOROUGH
    for step in (sorted(PLACES.values()) if kind == "auto" else [6])
]


@pytest.mark.parametrize(("kind", "schedule", "stopped_at"), RESUMED)
def test_a_resumed_run_draws_the_same_tokens(runs, kind, schedule, stopped_at):
    name = f"{kind} {schedule}"
    for a, b in zip(runs[name], runs[f"{name} from {stopped_at}"], strict=True):
        assert b["losses"] == a["losses"][-(STEPS - stopped_at) :]
        assert b["grad_norms"] == a["grad_norms"][-(STEPS - stopped_at) :]
        assert b["applied"] == [each for each in a["applied"] if each[0] > stopped_at]
        assert b.get("plan") == a.get("plan")
        assert b["average_freeze_ratio"] == a["average_freeze_ratio"]
    left = merged(runs[f"{name} from {stopped_at}"], "weights")
    right = merged(runs[name], "weights")
    assert [key for key in right if not torch.equal(left[key], right[key])] == []
