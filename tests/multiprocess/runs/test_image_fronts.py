"""What follows from the frozen front of an image classifier: cache, shorter pipelines, run-ahead.

Each run learns what a run learns that leaves it alone. Pictures come from a file, as they are.
"""

import pytest
import torch
from elastic_scenarios import FREEZING, losses_of_steps, rows_of_steps
from image_runs import KINDS, image_scenario
from launcher import EMULATED, assert_same, merged, run_scenarios

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

TWO_RANKS = {"parallelism__pipeline_parallel_degree": 2, "emulation__no_enable": None}
# Checks after steps 4, 6 and 8.
GROWING = {
    **COMMON,
    **FREEZING,
    "training__steps": 10,
    "freezing__linear.max_layers": 7,
    "checkpoint__enable": None,
}
LARGE = {**GROWING, **TWO_RANKS, "training__global_batch_size": 32}
ONE_KIND = ["vit", pytest.param("convnextv2", marks=LONG)]


def two_runs(folder, kind, settings, switch, *, n_processes=1, module, moves=False):
    """Return the ranks of a run that leaves the front alone, and of one with ``switch``."""
    pictures = write_parquet(folder / "pictures.parquet", list(rows(CLASSES, 3, SIZE))[:24])
    every = {**settings, "training__dataset_path": pictures}
    forms = {"plain": every, "own": {**every, **switch}}
    scenarios = [
        image_scenario(
            form, kind, more={"module": module, "is_elastic": moves and form == "own"}, **given
        )
        for form, given in forms.items()
    ]
    script = {"script": "elastic_run.py"} if moves else {}
    found = run_scenarios(folder, n_processes, scenarios, **script)
    return found["plain"], found["own"]


def assert_learns_the_same(plain, own):
    assert rows_of_steps(own) == rows_of_steps(plain)
    assert losses_of_steps(own) == pytest.approx(losses_of_steps(plain), rel=1e-5)
    for key in ("weights", "moments"):
        torch.testing.assert_close(merged(own, key), merged(plain, key), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "schedule", "room"), CASES)
def test_what_is_learned_behind_a_cached_front_is_the_same_to_the_last_bit(
    tmp_path, kind, schedule, room
):
    settings = {**COMMON, "parallelism__pipeline_parallel_schedule": schedule}
    cache = {"freezing__cache__enable": None, **(DISK if room == "disk" else {})}
    plain, own = two_runs(tmp_path, kind, settings, cache, module="cached_pictures")
    assert_same(plain, own)
    entered = [start for start, _ in own[0]["starts"] if start is not None]
    assert len(entered) >= 3
    assert (own[0]["read_ahead"] > 0) == (room == "disk")


@pytest.mark.parametrize("kind", ONE_KIND)
def test_in_shorter_pipelines_the_same_is_learned(tmp_path, kind):
    """Of a ViT also where blocks are cut in half, and rows of the front are read."""
    elastic = {"elastic.enable": None, "elastic.min_ranks": 1, "elastic.frozen_cost": 0.1}
    if kind == "vit":
        elastic |= {"elastic.sublayers": None, "cache.enable": None}
    switch = {f"freezing__{key}": value for key, value in elastic.items()}
    settings = {**GROWING, "training__steps": N_STEPS}
    stays, own = two_runs(tmp_path, kind, settings, switch, module="cached_pictures", moves=True)
    assert_learns_the_same(stays, own)
    n_ranks = [ranks for _, ranks, *_ in own[0]["pipelines"]]
    assert n_ranks[0] == 4
    assert n_ranks[-1] == 1
    assert any(own[0]["halves"]) == (kind == "vit")
    assert (own[0]["cache_entered"] > 0) == (kind == "vit")


@pytest.mark.parametrize("kind", ONE_KIND)
def test_a_front_that_works_ahead_learns_the_same_to_the_last_bit(tmp_path, kind):
    settings, switch = {**COMMON, **TWO_RANKS}, {"freezing__run_ahead": None}
    ranks = {"n_processes": 2, "module": "ahead_of_pictures"}
    waits, own = two_runs(tmp_path, kind, settings, switch, **ranks)
    assert_same(waits, own)
    goes_on = {step for step, _, goes_on in own[0]["ahead"] if goes_on}
    assert goes_on == set(range(3, N_STEPS))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_larger_batches_of_the_same_rows_learn_the_same(tmp_path, kind):
    switch, ranks = {"freezing__packing.mode": "performance"}, {"n_processes": 2, "moves": True}
    stays, own = two_runs(tmp_path, kind, LARGE, switch, module="tiny_images", **ranks)
    assert_learns_the_same(stays, own)
    sizes = [size for size, *_ in own[0]["batches"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
