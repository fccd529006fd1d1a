"""The library without TorchTitan: two pipelines of two ranks each, groups named by the user."""

import pytest
import torch
from launcher import SCHEDULES, asked_for, run_scenarios

# No schedule of torch's: microbatches in pairs, the last first on the way back; rank 1 splits it.
PAIRS = """\
0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3,2B3,2B2,0B3,0B2,2B1,2B0,0B1,0B0
1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3,3I3,3I2,1I3,1I2,3W3,3W2,1W3,1W2,3I1,3I0,1I1,1I0,3W1,3W0,1W1,1W0
"""
RUNS = {
    **{name: {"schedule": name} for name in SCHEDULES},
    **{f"shards {name}": {"schedule": name, "shards": True} for name in SCHEDULES},
    "csv": {"schedule": "Interleaved1F1B", "csv": PAIRS},
    "shards csv": {"schedule": "Interleaved1F1B", "csv": PAIRS, "shards": True},
}

FIXED = {"method": "fixed", "policy": {"layers": 5}}
GROWING = {"method": "linear", "policy": {"check_interval": 5, "layers_per_check": 3}}
# The front of 5 blocks ends in the middle of a stage.
CACHED = {
    **{name: {"schedule": name, "arguments": FIXED} for name in SCHEDULES},
    **{f"shards {n}": {"schedule": n, "arguments": FIXED, "shards": True} for n in SCHEDULES},
    "grows": {"schedule": "1F1B", "arguments": GROWING, "epochs": 6},
}
CACHED_SHORT = {"1F1B", "shards ZBVZeroBubble", "grows"}
CACHED_NAMES = [
    pytest.param(n, marks=[] if n in CACHED_SHORT else [pytest.mark.long]) for n in CACHED
]
SHORT = {"1F1B", "ZBVZeroBubble", "shards Interleaved1F1B", "shards ZBVZeroBubble", "csv"}
NAMES = [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in RUNS]


@pytest.fixture(scope="module")
def cached_runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("library_cache")
    scenarios = [
        {"name": name, "shards": False, "cache": {"memory_gib": 1.0}, **CACHED[name]}
        for (name,) in asked_for(request, "cached_name")
    ]
    return run_scenarios(folder, 4, scenarios, script="library_run.py")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    scenarios = [
        {"name": name, "arguments": {}, **RUNS[name]} for (name,) in asked_for(request, "name")
    ]
    return run_scenarios(tmp_path_factory.mktemp("library"), 4, scenarios, script="library_run.py")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_masked_reference(name, runs):
    for seen in runs[name]:
        assert seen["differ"] == []
        assert seen["n_frozen"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_replicas_freeze_the_same_by_one_plan(name, runs):
    ranks = runs[name]
    assert [seen["number"] for seen in ranks] == [0, 1, 2, 3]
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert one["masks"] == other["masks"]
    assert ranks[0]["plan"] is not None
    for seen in ranks[1:]:
        assert seen["plan"] == ranks[0]["plan"]
        assert seen["report"] == ranks[0]["report"]
        assert seen["state"] == ["rank_0", "rank_1", "rank_2", "rank_3"]


@pytest.mark.parametrize("cached_name", CACHED_NAMES)
def test_with_a_cache_the_same_is_learned_to_the_last_bit(cached_name, cached_runs):
    for seen in cached_runs[cached_name]:
        plain, cached = seen["plain"], seen["cached"]
        for part in ("losses", "weights"):
            assert len(plain[part]) == len(cached[part])
            assert all(map(torch.equal, plain[part], cached[part]))
        assert plain["entered"] is None
        # At least all batches of an epoch, which are three.
        assert cached["entered"] >= 3
    # Each pipeline has rows of its own; the last stage of the first is not that of the second.
    losses = [seen["cached"]["losses"] for seen in cached_runs[cached_name]]
    (first, second) = (of_rank for of_rank in losses if of_rank)
    assert not all(map(torch.equal, first, second))
