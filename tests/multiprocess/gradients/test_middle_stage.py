"""Gradients of a pipeline of three ranks: the one in the middle hands on what it has received.

torch 2.15 lets go of an output once it is sent. A microbatch of several rows shows whether a masked
backward finds its way from what is left of it.
"""

import pytest
from launcher import SCHEDULES, run_scenarios

CASES = {
    f"{schedule}, {rows} rows{', sharded' if shards else ''}": {
        "schedule": schedule,
        "rows": rows,
        "shards": shards,
    }
    for schedule in SCHEDULES
    for rows, shards in ((3, False), (4, True))
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    scenarios = [{"name": name, **case} for name, case in CASES.items()]
    folder = tmp_path_factory.mktemp("middle_stage")
    return run_scenarios(folder, 3, scenarios, script="middle_stage_run.py")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_chain_times_the_masks(name, runs):
    ranks = runs[name]
    for seen in ranks:
        assert seen["differ"] == []
        assert seen["n_compared"] > 10
        assert seen["n_frozen"] > 0
    assert [all(seen["losses"]) for seen in ranks if seen["losses"]] == [True]
