"""Elastic runs with starts of their own: under plans, with rows kept, eight processes, kills."""

import pytest
import torch
from elastic_scenarios import (
    FREEZING,
    N_STEPS,
    PHASES,
    PLANNED,
    THERE,
    losses_of_steps,
    per_step,
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
    """4 ranks try 4 and 8 microbatches in steps 2 to 9, 2 ranks 2 and 4 in steps 12 to 19.

    PipeTransformer measures every number from K to 6 K; here up to four that divide the rows.
    """
    settings = {
        "parallelism__pipeline_parallel_microbatch_size": 1,
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


@pytest.fixture(scope="module")
def planned(folder):
    """Runs with a plan, and runs that are resumed while times are measured again."""
    scenarios = []
    for name, more in {"plans": {}, "learns": {"freezing__gradient_rank": 4}}.items():
        saved = f"planned/{name}/checkpoint/step-11"
        settings = {"is_elastic": True, **PLANNED, **more}
        scenarios += [
            scenario(folder, name, save_at=[11], **settings),
            scenario(folder, f"{name} again", resumes=saved, **settings),
        ]
    return run_scenarios(folder / "planned", 4, scenarios, script="elastic_run.py")


@pytest.mark.long
def test_with_a_plan_it_moves_once_the_plan_is_in_force_and_measures_anew(planned):
    """More of plans is in ``test_elastic_emulation.py``."""
    moved = planned["plans"]
    assert [shape for _, *shape in moved[0]["pipelines"]] == [[4, 1, 8], [2, 2, 4]]
    phases = per_step(moved, "phases")
    assert [set(phases[step]) for step in sorted(phases)] == [{phase} for phase in PHASES]
    assert len({str(rank["plans"]) for rank in moved}) == 1
    rows = rows_of_steps(moved)
    assert all(len(of_step) == 8 for of_step in rows.values())


@pytest.mark.long
def test_it_plans_and_freezes_as_if_it_had_begun_there(planned, folder):
    scenarios = [scenario(folder, "there", is_elastic=False, front=7, **THERE)]
    there = run_scenarios(folder / "there", 4, scenarios, script="elastic_run.py")["there"]
    for rank, other in zip(planned["plans"], there, strict=True):
        assert rank["plans"][1:] == other["plans"]
        masks = [found for found in rank["masks"] if found[0] >= 10]
        assert masks == [found for found in other["masks"] if found[0] >= 10]
    assert rows_of_steps(planned["plans"]) == rows_of_steps(there)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plans", "learns"])
def test_a_planned_run_that_is_resumed_learns_the_same(planned, name):
    whole, again = planned[name], planned[f"{name} again"]
    for rank, resumed in zip(whole, again, strict=True):
        assert resumed["plans"][-1] == rank["plans"][-1]
        assert resumed["masks"] == [found for found in rank["masks"] if found[0] > 11]
        assert resumed["losses"] == [found for found in rank["losses"] if found[0] > 11]
    for key in ("weights", "moments"):
        want, have = merged(whole, key), merged(again, key)
        torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.fixture(scope="module")
def kept(folder):
    """Runs whose front is kept by row, and one that has no room for it."""
    # Four steps of two batches in an epoch. Moves before steps 8 and 13. A cache without room makes
    # the same order of rows.
    scenarios = [
        scenario(
            folder,
            name,
            is_elastic=True,
            training__steps=16,
            training__local_batch_size=4,
            training__global_batch_size=8,
            parallelism__pipeline_parallel_microbatch_size=1,
            training__dataset_path=folder / "few_rows.jsonl",
            **{
                "freezing__linear.check_interval": 5,
                "freezing__cache.enable": None,
                "freezing__cache.memory_gib": memory,
                "freezing__cache.disk_gib": disk,
                "freezing__cache.folder": "rows",
            },
        )
        for name, memory, disk in (("keeps rows", 1.0, 1.0), ("keeps none", 1e-9, 0.0))
    ]
    return run_scenarios(folder, 4, scenarios, script="elastic_run.py")


@pytest.mark.long
def test_rows_are_read_after_a_move_that_another_process_has_kept(kept, folder):
    cached, computed = kept["keeps rows"], kept["keeps none"]
    assert [shape for _, *shape in cached[0]["pipelines"]] == [[4, 1, 4], [4, 1, 4], [2, 2, 2]]
    assert [rank["cache_entered"] for rank in computed] == [0, 0, 0, 0]
    # One process had all rows in memory after step 12. Two replicas read them in the first epoch
    # after the move, but for the two steps that are computed in any case.
    assert [rank["cache_entered"] for rank in cached] == [4, 4, 4, 4]
    assert len(list((folder / "keeps rows/rows").rglob("depth_4_*/*.safetensors"))) == 32
    for key in ("rows", "losses", "weights", "moments"):
        for one, other in zip(cached, computed, strict=True):
            torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
