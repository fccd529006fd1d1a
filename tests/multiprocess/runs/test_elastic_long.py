"""Elastic runs with starts of their own: eight processes, microbatches that are tried, kills."""

import pytest
import torch
from elastic_scenarios import (
    FREEZING,
    N_STEPS,
    losses_of_steps,
    rows_folder,
    rows_of_steps,
    scenario,
)
from faults import equal_weights, run_with
from launcher import merged, run_scenarios

folder = rows_folder


def assert_same_learned(have, want):
    """The same rows, losses, weights and moments."""
    assert rows_of_steps(have) == rows_of_steps(want)
    assert losses_of_steps(have) == pytest.approx(losses_of_steps(want), rel=1e-6)
    for key in ("weights", "moments"):
        torch.testing.assert_close(merged(have, key), merged(want, key), rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_processes_move_to_four_ranks_and_to_two(folder):
    """Of 10 layers 7 are frozen after step 4, 9 after step 6."""
    settings = {
        "parallelism__pipeline_parallel_degree": 8,
        "training__local_batch_size": 16,
        "training__steps": 8,
        "freezing__linear.layers_per_check": 7,
    }
    scenarios = [
        scenario(folder, name, is_elastic=name == "moves", **settings)
        for name in ("stays", "moves")
    ]
    seen = run_scenarios(folder / "eight", 8, scenarios, script="elastic_run.py", timeout_s=850)
    shapes = [shape for _, *shape in seen["moves"][0]["pipelines"]]
    assert shapes == [[8, 1, 16], [4, 2, 8], [2, 4, 4]]
    assert_same_learned(seen["moves"], seen["stays"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_of_the_microbatches_that_are_tried_the_fastest_stay(folder):
    """4 ranks try 4 and 8 microbatches in steps 2 to 9, 2 ranks 2 and 4 in steps 12 to 19."""
    settings = {
        "training__steps": 20,
        "freezing__linear.check_interval": 9,
        "freezing__linear.layers_per_check": 9,
        # Adam divides gradients that are almost 0 by themselves, and so makes their rounding large.
        "optimizer__eps": 1e-3,
    }
    # 4 microbatches are faster on three of four ranks.
    seconds = {"4 4": [1, 1, 1, 5], "4 8": [2] * 4, "2 2": [1] * 4, "2 4": [3] * 4}
    searching = {"freezing__elastic.search_microbatches": None}
    scenarios = [
        scenario(folder, "stays", is_elastic=False, **settings),
        scenario(folder, "tries", is_elastic=True, seconds=seconds, **settings, **searching),
    ]
    seen = run_scenarios(folder / "tried", 4, scenarios, script="elastic_run.py", timeout_s=850)
    assert [tuple(sizes[:2]) for sizes in seen["tries"][0]["batches"]] == [
        (1, 8), (2, 8), (1, 8), (2, 4), (1, 4), (2, 4)]  # fmt: skip
    assert_same_learned(seen["tries"], seen["stays"])


@pytest.mark.long
def test_killed_in_the_midst_of_a_move_it_comes_to_the_same_weights(folder):
    settings = {
        "model__flavor": "8M",
        "parallelism__pipeline_parallel_degree": 4,
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "training__dataset_path": folder / "rows.jsonl",
        "training__seq_len": 64,
        "training__steps": N_STEPS,
        "training__global_batch_size": 8,
        "freezing__last_monitor_step": False,
        "freezing__last_ramp_step": False,
        "checkpoint__interval": 2,
        **FREEZING,
        "freezing__elastic.enable": None,
    }
    ended = run_with({}, folder / "undisturbed", n_processes=4, **settings)
    assert ended.status == 0, ended.output[-4000:]
    for place in ("hand_over", "take_over"):
        fault = {"at": place, "rank": 2, "signal": "SIGKILL"}
        killed = run_with(fault, folder / "killed", n_processes=4, **settings)
        assert killed.status != 0
        assert killed.left == []
    last = run_with({}, folder / "killed", n_processes=4, **settings)
    assert last.lines("Training starts at step 5")
    assert len(last.lines("the run goes on in a pipeline of")) == 3
    assert equal_weights(folder / "killed", folder / "undisturbed", n_processes=4)
