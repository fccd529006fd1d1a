"""The library without TorchTitan: two pipelines of two ranks each, groups named by the user."""

import pytest
from launcher import SCHEDULES, asked_for, run_scenarios


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    scenarios = [
        {"name": schedule, "schedule": schedule, "arguments": {}}
        for (schedule,) in asked_for(request, "schedule")
    ]
    return run_scenarios(tmp_path_factory.mktemp("library"), 4, scenarios, script="library_run.py")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_the_masked_reference(schedule, runs):
    for seen in runs[schedule]:
        assert seen["differ"] == []
        assert seen["n_frozen"] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_freeze_the_same_by_one_plan(schedule, runs):
    ranks = runs[schedule]
    assert [seen["number"] for seen in ranks] == [0, 1, 2, 3]
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert one["masks"] == other["masks"]
    assert ranks[0]["plan"] is not None
    for seen in ranks[1:]:
        assert seen["plan"] == ranks[0]["plan"]
        assert seen["report"] == ranks[0]["report"]
        assert seen["state"] == ["rank_0", "rank_1", "rank_2", "rank_3"]
