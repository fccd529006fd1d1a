"""Pipelines whose stages are replicated, sharded or split within tensors freeze as plain ones do.

Replicas with microbatches of one row see together what a single pipeline sees with larger ones (see
``test_hybrid``); tensor parallelism changes nothing of what is seen.
"""

import pytest
from launcher import arguments, merged, run_scenarios
from methods import ROWS
from test_hybrid import SETTINGS, rows_seen

PLANNED = next(row for row in ROWS if row.method == "timelyfreeze")
SCHEDULES = ("1F1B", "ZBVZeroBubble")
# Processes, rows that a microbatch has in the pipeline it is compared with, and keys.
COMBINATIONS = {
    "HSDP": (
        8,
        4,
        {
            "parallelism__data_parallel_replicate_degree": 2,
            "parallelism__data_parallel_shard_degree": 2,
        },
    ),
    "TP": (4, 1, {"parallelism__tensor_parallel_degree": 2}),
    "FSDP and TP": (
        8,
        2,
        {
            "parallelism__data_parallel_shard_degree": 2,
            "parallelism__tensor_parallel_degree": 2,
        },
    ),
}


def run_schedules(folder, n_processes, **settings):
    scenarios = [
        {
            "name": schedule,
            "fake_clock": True,
            "args": arguments(
                **{**SETTINGS, **PLANNED.arguments, **settings},
                parallelism__pipeline_parallel_schedule=schedule,
            ),
        }
        for schedule in SCHEDULES
    ]
    return run_scenarios(folder, n_processes, scenarios, timeout_s=600)


@pytest.fixture(scope="module", params=COMBINATIONS)
def both(request, tmp_path_factory):
    """The combination, and a pipeline of two processes that sees the same rows."""
    n_processes, n_rows, keys = COMBINATIONS[request.param]
    name = request.param.replace(" ", "_")
    return (
        run_schedules(tmp_path_factory.mktemp(name), n_processes, **keys),
        run_schedules(
            tmp_path_factory.mktemp(f"{name}_plain"),
            2,
            training__local_batch_size=8 * n_rows,
            parallelism__pipeline_parallel_microbatch_size=n_rows,
        ),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_processes_of_a_stage_freeze_the_same(both, schedule):
    masks = {}
    for seen in both[0][schedule]:
        for step, stage, mask in seen["masks"]:
            masks.setdefault((step, stage), []).append(mask)
    n_replicas = len(both[0][schedule]) // 2
    assert any(any(mask.values()) for alike in masks.values() for mask in alike)
    for alike in masks.values():
        assert len(alike) == n_replicas
        assert all(mask == alike[0] for mask in alike)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_equals_a_plain_pipelines(both, schedule):
    several, plain = (run[schedule] for run in both)
    assert rows_seen(several) == rows_seen(plain)
    assert several[0]["plan"] == plain[0]["plan"]
    left, right = merged(several, "weights"), merged(plain, "weights")
    assert left.keys() == right.keys()
    for name in left:
        difference = float((left[name] - right[name]).abs().max())
        assert difference < 1e-5, f"{name}: {difference:.2e}"
