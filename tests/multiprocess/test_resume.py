"""A run stopped in any phase and resumed equals, bit for bit, one that never stopped.

Durations are the one input that cannot repeat, so the recorder's times are replaced by fixed ones.
"""

import pytest
import torch
from launcher import arguments, merged, run_scenarios

# Steps 1-2 warm-up, 3-4 upper bound, 5-6 lower bound, 7-9 ramp, then stable.
PHASES = {"warm-up": 1, "upper bound": 3, "lower bound": 5, "solved": 6, "ramp": 8, "stable": 11}
STEPS = 13
SCHEDULES = ["1F1B", "ZBVZeroBubble"]


def freezing_arguments(schedule, **more):
    return arguments(
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_schedule=schedule,
        freezing__method="timelyfreeze",
        freezing__last_warmup_step=2,
        freezing__last_monitor_step=6,
        freezing__last_ramp_step=9,
        freezing__discard_passes=1,
        training__steps=STEPS,
        training__global_batch_size=16,
        checkpoint__enable=None,
        checkpoint__interval=1,
        checkpoint__keep_latest_k=0,
        checkpoint__no_last_save_model_only=None,
        **more,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    scenarios = []
    for schedule in SCHEDULES:
        scenarios.append(
            {"name": schedule, "fake_clock": True, "args": freezing_arguments(schedule)}
        )
        for phase, step in PHASES.items():
            resumed = freezing_arguments(
                schedule,
                checkpoint__initial_load_path=folder / schedule / "checkpoint" / f"step-{step}",
                checkpoint__no_initial_load_model_only=None,
                checkpoint__load_only=None,
            )
            scenarios.append(
                {
                    "name": f"{schedule} from {phase}",
                    "fake_clock": True,
                    "fixed_weights": False,
                    "args": resumed,
                }
            )
    return run_scenarios(folder, 2, scenarios)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("phase", PHASES)
def test_resumed_run_equals_undisturbed(runs, schedule, phase):
    whole, resumed = runs[schedule], runs[f"{schedule} from {phase}"]
    stopped_at = PHASES[phase]
    passes_left = 2 * (STEPS - stopped_at)
    for a, b in zip(whole, resumed, strict=True):
        assert b["losses"] == a["losses"][-passes_left:]
        assert b["grad_norms"] == a["grad_norms"][-(STEPS - stopped_at) :]
        assert all(map(torch.equal, b["batches"], a["batches"][-passes_left:]))
        assert b["masks"] == [m for m in a["masks"] if m[0] > stopped_at]
        assert b["plan"] == a["plan"]
        assert b["average_freeze_ratio"] == a["average_freeze_ratio"]
    left, right = merged(resumed, "weights"), merged(whole, "weights")
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_undisturbed_run_freezes_in_every_phase(runs, schedule):
    """Without this the test above could pass on runs that never froze anything."""
    for seen in runs[schedule]:
        frozen = {}
        for step, _, masks in seen["masks"]:
            frozen.setdefault(step, []).extend(any(mask) for mask in masks.values())
        assert not any(any(frozen.get(step, [])) for step in (1, 2, 3, 4))
        assert all(frozen[5])
        assert all(frozen[6])
        assert sum(seen["plan"].values()) > 0
    stable = [
        mask
        for seen in runs[schedule]
        for step, _, masks in seen["masks"]
        if step > 9
        for mask in masks.values()
    ]
    assert any(any(mask) for mask in stable)
    assert any(not all(mask) for mask in stable)
