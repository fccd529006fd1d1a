"""What follows from the frozen front of an image classifier: cache, shorter pipelines, run-ahead.

Each run learns what a run learns that leaves it alone. Pictures come from a file, as they are.
"""

import pytest
import torch
from elastic_scenarios import FREEZING, losses_of_steps, rows_of_steps
from image_runs import KINDS, image_scenario
from launcher import EMULATED, asked_for, assert_same, merged, run_scenarios

from tests.tools.make_assets.pictures import rows, write_parquet
from tests.torchtitan.helpers.image_models import CLASSES, SIZE

pytest.importorskip("transformers")
pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

N_STEPS = 16
DISK = {"freezing__cache__memory_gib": 0, "freezing__cache__disk_gib": 1}
# Depth 5 ends within a stage; an epoch has three batches.
COMMON = {
    "training__steps": N_STEPS,
    "training__local_batch_size": 8,
    "training__mixed_precision_param": "float32",
    "vision__augmentation": "none",
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "freezing__method": "fixed",
    "freezing__last_warmup_step": 2,
    "freezing__fixed__layers": 5,
    **EMULATED,
}
LONG = [pytest.mark.long]
CASES = [
    ("vit", "1F1B", "memory"),
    ("convnextv2", "ZBVZeroBubble", "disk"),
    pytest.param("vit", "ZBVZeroBubble", "disk", marks=LONG),
    pytest.param("convnextv2", "1F1B", "memory", marks=LONG),
]

TWO_RANKS = {
    "parallelism__pipeline_parallel_degree": 2,
    "freezing__fixed__layers": 5,
    "emulation__no_enable": None,
}
ONE_KIND = ["vit", pytest.param("convnextv2", marks=LONG)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_fronts")
    return write_parquet(folder / "pictures.parquet", list(rows(CLASSES, 3, SIZE))[:24])


@pytest.fixture(scope="module")
def cached(request, pictures):
    scenarios = []
    for kind, schedule, room in asked_for(request, "kind", "schedule", "room"):
        for cache in ({}, {"freezing__cache__enable": None, **(DISK if room == "disk" else {})}):
            name = f"{kind} {schedule} {'cached' if cache else 'plain'}"
            key = {"parallelism__pipeline_parallel_schedule": schedule}
            more = {"module": "cached_pictures"}
            settings = {**COMMON, "training__dataset_path": pictures, **key, **cache}
            scenarios.append(image_scenario(name, kind, more=more, **settings))
    return run_scenarios(pictures.parent / "cached", 1, scenarios)


@pytest.mark.parametrize(("kind", "schedule", "room"), CASES)
def test_what_is_learned_behind_a_cached_front_is_the_same_to_the_last_bit(
    cached, kind, schedule, room
):
    plain, own = (cached[f"{kind} {schedule} {form}"] for form in ("plain", "cached"))
    assert_same(plain, own)
    entered = [start for start, _ in own[0]["starts"] if start is not None]
    assert len(entered) >= 3
    assert (own[0]["read_ahead"] > 0) == (room == "disk")


@pytest.fixture(scope="module")
def elastic(request, pictures):
    scenarios = []
    for (kind,) in asked_for(request, "kind"):
        for form in ("stays", "moves"):
            settings = {**COMMON, **FREEZING, "training__dataset_path": pictures}
            settings |= {"training__steps": 10, "freezing__linear.max_layers": 7}
            settings |= {"checkpoint__enable": None}
            settings |= {"freezing__elastic.enable": None} if form == "moves" else {}
            more = {"module": "tiny_images", "is_elastic": form == "moves"}
            scenarios.append(image_scenario(f"{kind} {form}", kind, more=more, **settings))
    return run_scenarios(pictures.parent / "elastic", 1, scenarios, script="elastic_run.py")


@pytest.mark.parametrize("kind", ONE_KIND)
def test_in_shorter_pipelines_the_same_is_learned(elastic, kind):
    stays, moves = elastic[f"{kind} stays"], elastic[f"{kind} moves"]
    assert rows_of_steps(moves) == rows_of_steps(stays)
    assert losses_of_steps(moves) == pytest.approx(losses_of_steps(stays), rel=1e-5)
    for key in ("weights", "moments"):
        want, have = merged(stays, key), merged(moves, key)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)
    n_ranks = [ranks for _, ranks, *_ in moves[0]["pipelines"]]
    assert n_ranks[0] == 4
    assert n_ranks[-1] < 4


@pytest.fixture(scope="module")
def ahead(request, pictures):
    scenarios = []
    for (kind,) in asked_for(request, "kind"):
        for form in ("waits", "ahead"):
            settings = {**COMMON, **TWO_RANKS, "training__dataset_path": pictures}
            settings |= {"freezing__run_ahead": None} if form == "ahead" else {}
            more = {"module": "ahead_of_pictures"}
            scenarios.append(image_scenario(f"{kind} {form}", kind, more=more, **settings))
    return run_scenarios(pictures.parent / "ahead", 2, scenarios)


@pytest.mark.parametrize("kind", ONE_KIND)
def test_a_front_that_works_ahead_learns_the_same_to_the_last_bit(ahead, kind):
    assert_same(ahead[f"{kind} waits"], ahead[f"{kind} ahead"])
    goes_on = {step for step, _, goes_on in ahead[f"{kind} ahead"][0]["ahead"] if goes_on}
    assert goes_on == set(range(3, N_STEPS))


@pytest.fixture(scope="module")
def packed(request, pictures):
    scenarios = []
    for (kind,) in asked_for(request, "kind"):
        for form in ("stays", "packs"):
            settings = {**COMMON, **FREEZING, **TWO_RANKS, "training__dataset_path": pictures}
            settings |= {
                "training__steps": 10,
                "training__global_batch_size": 32,
                "freezing__linear.max_layers": 7,
                "checkpoint__enable": None,
            }
            settings |= {"freezing__packing.mode": "performance"} if form == "packs" else {}
            more = {"module": "tiny_images", "is_elastic": form == "packs"}
            scenarios.append(image_scenario(f"{kind} {form}", kind, more=more, **settings))
    return run_scenarios(pictures.parent / "packed", 2, scenarios, script="elastic_run.py")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_larger_batches_of_the_same_rows_learn_the_same(packed, kind):
    stays, packs = packed[f"{kind} stays"], packed[f"{kind} packs"]
    assert rows_of_steps(packs) == rows_of_steps(stays)
    assert losses_of_steps(packs) == pytest.approx(losses_of_steps(stays), rel=1e-5)
    for key in ("weights", "moments"):
        torch.testing.assert_close(merged(packs, key), merged(stays, key), rtol=1e-4, atol=1e-6)
    sizes = [size for size, *_ in packs[0]["batches"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
