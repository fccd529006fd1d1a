"""The library without TorchTitan: two pipelines of two ranks each, groups named by the user."""

import pytest
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


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    scenarios = [
        {"name": name, "arguments": {}, **RUNS[name]} for (name,) in asked_for(request, "name")
    ]
    return run_scenarios(tmp_path_factory.mktemp("library"), 4, scenarios, script="library_run.py")


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_the_masked_reference(name, runs):
    for seen in runs[name]:
        assert seen["differ"] == []
        assert seen["n_frozen"] > 0


@pytest.mark.parametrize("name", RUNS)
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
