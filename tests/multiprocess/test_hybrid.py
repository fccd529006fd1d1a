"""A pipeline whose stages are sharded over replicas freezes as one that is not.

Two replicas with microbatches of one row see what a single pipeline sees with microbatches of two
rows: rows are dealt out in turn, and masks depend on step, pass, microbatch and stage alone.
"""

import itertools

import pytest
from launcher import arguments, merged, run_scenarios

SCHEDULES = ["1F1B", "ZBVZeroBubble"]
STEPS = 12
FREEZING = {
    "parallelism__pipeline_parallel_degree": 2,
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 2,
    "freezing__last_monitor_step": 6,
    "freezing__last_ramp_step": 9,
    "freezing__discard_passes": 0,
    "training__steps": STEPS,
    "lr_scheduler__warmup_steps": 2,
    # Adam turns rounding of a near-zero gradient into a full step; with a large eps updates are
    # linear in gradients.
    "optimizer__lr": 0.1,
    "optimizer__eps": 10.0,
    "data__no_shuffle": None,
    # Long enough that no row is dropped, which would shift what each replica sees.
    "training__seq_len": 128,
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    scenarios = [
        {
            "name": schedule,
            "fake_clock": True,
            "args": arguments(
                **FREEZING,
                parallelism__pipeline_parallel_schedule=schedule,
                parallelism__data_parallel_shard_degree=2,
            ),
        }
        for schedule in SCHEDULES
    ]
    return run_scenarios(tmp_path_factory.mktemp("sharded"), 4, scenarios)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    scenarios = [
        {
            "name": schedule,
            "fake_clock": True,
            "args": arguments(
                **FREEZING,
                parallelism__pipeline_parallel_schedule=schedule,
                training__local_batch_size=16,
                parallelism__pipeline_parallel_microbatch_size=2,
            ),
        }
        for schedule in SCHEDULES
    ]
    return run_scenarios(tmp_path_factory.mktemp("whole"), 2, scenarios)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_freeze_the_same(sharded, schedule):
    masks = {}
    for seen in sharded[schedule]:
        for step, stage, mask in seen["masks"]:
            masks.setdefault((step, stage), []).append(mask)
    assert masks
    assert all(len(both) == 2 and both[0] == both[1] for both in masks.values())


def rows_seen(ranks):
    """Return the rows of every step as a set; replicas' rows together are those of one pipeline."""
    steps = [
        [sorted(map(tuple, batch.tolist())) for batch in seen["batches"]]
        for seen in {tuple(seen["batches"][0][0].tolist()): seen for seen in ranks}.values()
    ]
    return [sorted(itertools.chain(*step)) for step in zip(*steps, strict=True)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_see_the_same_rows(sharded, whole, schedule):
    assert rows_seen(sharded[schedule]) == rows_seen(whole[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_training_equals_whole(sharded, whole, schedule):
    left, right = merged(sharded[schedule], "weights"), merged(whole[schedule], "weights")
    assert left.keys() == right.keys()
    for name in left:
        difference = float((left[name] - right[name]).abs().max())
        assert difference < 1e-5, f"{name}: {difference:.2e}"
    plan = whole[schedule][0]["plan"]
    assert sharded[schedule][0]["plan"] == plan
    assert any(ratio > 0 for ratio in plan.values())
