"""A pipeline whose stages are sharded over replicas freezes as one that is not.

Two replicas with microbatches of one row see what a single pipeline sees with microbatches of two
rows: rows are dealt out in turn, and masks depend on step, pass, microbatch and stage alone.
"""

import itertools

import pytest
from launcher import arguments, assert_near, merged, run_scenarios
from methods import ROWS

# In the suite ``test_hybrid_gradients`` has sharded stages, with one method.
pytestmark = pytest.mark.long

STEPS = 12
# Every method on one schedule; those with a plan, and a frozen prefix, on a split backward too.
CASES = {f"{row.method} 1F1B": (row, "1F1B") for row in ROWS}
CASES |= {
    f"{row.method} ZBVZeroBubble": (row, "ZBVZeroBubble")
    for row in ROWS
    if row.method in ("timelyfreeze", "pipetransformer")
}
SETTINGS = {
    "model__flavor": "tiny",
    "parallelism__pipeline_parallel_degree": 2,
    "training__steps": STEPS,
    "lr_scheduler__warmup_steps": 2,
    # Adam turns rounding of a near-zero gradient into a full step; with a large eps updates are
    # linear in gradients.
    "optimizer__lr": 0.1,
    "optimizer__eps": 10.0,
    "data__no_shuffle": None,
    "parallelism__pipeline_parallel_microbatch_size": 1,
    # Long enough that no row is dropped, which would shift what each replica sees.
    "training__seq_len": 128,
}

# Under a large eps updates hardly change direction, so scores stay near 1.
APF = {"freezing__apf__threshold": 0.9992}


def run_cases(folder, n_processes, **settings):
    scenarios = [
        {
            "name": name,
            "module": row.module,
            "fake_clock": True,
            "args": arguments(
                **{**SETTINGS, **row.arguments, **settings, **APF},
                parallelism__pipeline_parallel_schedule=schedule,
            ),
        }
        for name, (row, schedule) in CASES.items()
    ]
    return run_scenarios(folder, n_processes, scenarios, timeout_s=600)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run_cases(
        tmp_path_factory.mktemp("sharded"), 4, parallelism__data_parallel_shard_degree=2
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_cases(
        tmp_path_factory.mktemp("whole"),
        2,
        training__local_batch_size=16,
        parallelism__pipeline_parallel_microbatch_size=2,
    )


@pytest.mark.parametrize("case", CASES)
def test_replicas_freeze_the_same(sharded, case):
    masks = {}
    for seen in sharded[case]:
        for step, stage, mask in seen["masks"]:
            masks.setdefault((step, stage), []).append(mask)
    assert any(any(mask.values()) for both in masks.values() for mask in both)
    assert all(len(both) == 2 and both[0] == both[1] for both in masks.values())
    assert all(seen["decided"] == sharded[case][0]["decided"] for seen in sharded[case])


def rows_seen(ranks):
    """Return the rows of every step as a set; replicas' rows together are those of one pipeline."""
    steps = [
        [sorted(map(tuple, batch.tolist())) for batch in seen["batches"]]
        for seen in {tuple(seen["batches"][0][0].tolist()): seen for seen in ranks}.values()
    ]
    return [sorted(itertools.chain(*step)) for step in zip(*steps, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_both_see_the_same_rows(sharded, whole, case):
    assert rows_seen(sharded[case]) == rows_seen(whole[case])


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_whole(sharded, whole, case):
    assert_near(merged(sharded[case], "weights"), merged(whole[case], "weights"))
    assert sharded[case][0]["decided"] == whole[case][0]["decided"]
    if CASES[case][0].plans:
        plan = whole[case][0]["plan"]
        assert sharded[case][0]["plan"] == plan
        assert any(ratio > 0 for ratio in plan.values())
