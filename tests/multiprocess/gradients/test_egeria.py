"""Blocks that are sharded and recomputed are compared, also elsewhere, and all decide alike.

Under a plan the ranks are emulated.
"""

import pytest
from launcher import EMULATED, arguments, assert_goes_on, merged, run_scenarios
from methods import ROWS, STEPS
from saving import SAVED, resumed_from

(ROW,) = [row for row in ROWS if row.method == "egeria"]
FEW_STEPS, STOP = 9, 6
COMMON = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "parallelism__pipeline_parallel_schedule": "1F1B",
    "training__steps": STEPS,
    **ROW.arguments,
}
SHARDED = {
    "parallelism__pipeline_parallel_microbatch_size": 4,
    "parallelism__data_parallel_shard_degree": 2,
    "training__mixed_precision_param": "bfloat16",
    "training__global_batch_size": 32,  # two batches of each replica
    "activation_checkpoint__mode": "full",
    "freezing__egeria__window": 4,  # the copy is older than the step of the stop
    "training__steps": FEW_STEPS,
    **SAVED,
}
PROCESS = {
    "parallelism__data_parallel_shard_degree": 2,
    "freezing__egeria__reference": "background",
}


COMPILED = {
    "parallelism__data_parallel_shard_degree": 2,
    "activation_checkpoint__mode": "selective",
    "compile__enable": None,
    "compile__backend": "aot_eager",
}
HYBRID = {
    **EMULATED,
    "model__flavor": "tiny",
    "parallelism__pipeline_parallel_degree": 4,
    "parallelism__pipeline_parallel_microbatch_size": 1,
    "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble",
    "freezing__method": "timelyfreeze+egeria",
}


def scenario(name, settings, **more):
    return {"name": name, "fake_clock": True, "args": arguments(**{**COMMON, **settings}), **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("egeria")
    going_on = resumed_from(folder / "sharded" / "checkpoint" / f"step-{STOP}")
    scenarios = [
        scenario("sharded", SHARDED, save_at=[STOP]),
        scenario("resumed", {**SHARDED, **going_on}, save_at=[], fixed_weights=False),
    ]
    planned = [scenario("under a plan", HYBRID)]
    seen = run_scenarios(folder, 4, scenarios, timeout_s=600)
    return seen | run_scenarios(folder, 1, planned)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    scenarios = [
        scenario("process", PROCESS, module="patient_reference"),
        scenario("compiled", COMPILED),
    ]
    return run_scenarios(tmp_path_factory.mktemp("others"), 4, scenarios, timeout_s=600)


def n_frozen(seen):
    return [len(names) for _, names in seen["decided"]]


@pytest.mark.parametrize(
    ("runs_of", "name"),
    [
        ("runs", "sharded"),
        pytest.param("others", "process", marks=[pytest.mark.long]),
        pytest.param("others", "compiled", marks=[pytest.mark.long]),
    ],
)
def test_all_ranks_decide_alike_and_freeze_something(request, runs_of, name):
    ranks = request.getfixturevalue(runs_of)[name]
    assert all(seen["decided"] == ranks[0]["decided"] for seen in ranks)
    assert all(seen["warnings"] == [] for seen in ranks)
    frozen = n_frozen(ranks[0])
    assert frozen[0] == 0 < frozen[-1]
    gradients = merged(ranks, "gradients")
    _, last = ranks[0]["decided"][-1]
    without = [name for name, gradient in gradients.items() if gradient is None]
    assert {name.replace("_orig_mod.", "") for name in without} == set(last)


@pytest.mark.long
def test_a_process_of_its_own_finds_what_freezes_module_after_module(others):
    # Two evaluations each, up to steps 6, 8 and 10, as in the training process itself.
    by_step = {step: len(names) for step, names in others["process"][0]["decided"]}
    assert 0 == by_step[6] < by_step[7] < by_step[9] < by_step[11]


def test_under_a_plan_its_choice_is_brought_to_the_ratio(runs):
    ranks = runs["under a plan"]
    assert sum(ranks[0]["plan"].values()) > 0.0
    assert all(seen["decided"] == ranks[0]["decided"] for seen in ranks)
    decided = dict(ranks[0]["decided"])
    assert decided[STEPS]
    relations = set()
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            chosen = set(decided[step]) & set(seen["names"][stage])
            if step < STEPS or not chosen:
                continue
            for mask in masks.values():
                frozen = {n for n, f in zip(seen["names"][stage], mask, strict=True) if f}
                relations.add(chosen <= frozen or frozen <= chosen)
    assert relations == {True}


def test_a_resumed_run_goes_on_with_the_copy_that_it_had(runs):
    assert_goes_on(runs["sharded"], runs["resumed"], STOP)
