"""Runs that read what the frozen front puts out learn what runs without a cache learn.

Weights and losses are compared to the last bit, in float32. The small data set has few rows, so
that epochs are short and every row comes again. Most ranks are emulated; real ones show that the
rank that needs a row is the one that reads it, and that all begin alike.
"""

import itertools
import shutil

import pytest
from launcher import ROOT, SCHEDULES, arguments, asked_for, assert_same, run_scenarios
from methods import ROW
from saving import SAVED, resumed_from

N_ROWS, STEPS = 24, 16
RESUMED_AT = 11
DISK = {"freezing__cache__memory_gib": 0, "freezing__cache__disk_gib": 1}
# Depth 5 ends within a stage of two blocks. Two batches in a step, of which each is a third of an
# epoch; microbatches of two rows.
TWO_BATCHES = {
    "training__global_batch_size": 16,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "training__steps": 10,
}
TWO_RANKS = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 1,
    "training__local_batch_size": 4,
}
VALIDATED = {
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
    "validation__local_batch_size": 8,
    "validation__seq_len": 48,
    "validation__freq": 3,
    "validation__steps": 2,
}
GROWING = {**ROW["linear"].settings, "freezing__linear__check_interval": 9}
# The first module freezes early, and what is left is watched while its input is read.
WATCHED = {
    **ROW["egeria"].settings,
    "freezing__egeria__unfreeze_at": 0.0,
}
METHODS = {
    "fixed": {},
    "linear": GROWING,
    "autofreeze": ROW["autofreeze"].settings,
    "egeria": WATCHED,
}
CASES = [
    *((4, "fixed", schedule, {}) for schedule in SCHEDULES),
    (2, "fixed", "1F1B", TWO_BATCHES),
    (2, "fixed", "ZBVZeroBubble", {**TWO_BATCHES, **DISK}),
    # A front that grows in the middle of an epoch.
    (1, "linear", "GPipe", {**TWO_RANKS, "training__steps": 27}),
    (1, "linear", "ZBVZeroBubble", {**TWO_RANKS, "training__steps": 27}),
    (
        1,
        "autofreeze",
        "1F1B",
        {**TWO_RANKS, "training__local_batch_size": 8, "training__max_norm": 0.5},
    ),
    (1, "fixed", "GPipe", {**VALIDATED, "parallelism__pipeline_parallel_degree": 2}),
    (1, "egeria", "1F1B", {**TWO_RANKS, "training__steps": 33}),
    (1, "fixed", "1F1B", {}),
    (1, "fixed", "ZBVZeroBubble", TWO_BATCHES),
]
# Other schedules, more ranks, and emulations with several batches in a step.
LONG = {0, 1, 2, 3, 4, 5, 6, 8, len(CASES) - 2, len(CASES) - 1}
NUMBERS = [
    pytest.param(number, marks=[pytest.mark.long] if number in LONG else [])
    for number in range(len(CASES))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    (folder / "data").mkdir()
    lines = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "train.jsonl").write_text("".join(lines[:N_ROWS]))
    return folder


def scenario(name, folder, n_processes, method, schedule, settings, *, cached, **more):
    every = {
        "model__flavor": "tiny",
        "training__dataset": "alpaca",
        "training__dataset_path": str(folder / "data"),
        "training__seq_len": 128,
        "training__steps": STEPS,
        "parallelism__pipeline_parallel_degree": 4 if n_processes == 1 else n_processes,
        "parallelism__pipeline_parallel_schedule": schedule,
        "freezing__method": method,
        "freezing__last_warmup_step": 2,
        "freezing__fixed__layers": 5,
        **METHODS[method],
        **({"emulation__enable": None} if n_processes == 1 else {}),
        **settings,
        **({"freezing__cache__enable": None} if cached else {}),
    }
    if not cached:
        every = {key: value for key, value in every.items() if "__cache__" not in key}
    return {"name": name, "module": "always_reads", "args": arguments(**every), **more}


@pytest.fixture(scope="module")
def runs(request, folder):
    """{number of a case: (ranks without a cache, ranks with)}."""
    chosen = [number for (number,) in asked_for(request, "number")]
    seen = {}
    for n_processes in sorted({CASES[number][0] for number in chosen}):
        mine = [number for number in chosen if CASES[number][0] == n_processes]
        scenarios = [
            scenario(f"{number} {cached}", folder, *CASES[number], cached=cached)
            for number, cached in itertools.product(mine, (False, True))
        ]
        found = run_scenarios(folder / f"{n_processes}", n_processes, scenarios, timeout_s=900)
        seen |= {n: (found[f"{n} False"], found[f"{n} True"]) for n in mine}
    return seen


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_learned_is_the_same_to_the_last_bit(runs, number):
    plain, cached = runs[number]
    assert_same(plain, cached)
    # All ranks know of the same batches.
    assert all(seen["starts"] == cached[0]["starts"] for seen in cached)
    starts = [start for start, _ in cached[0]["starts"] if start is not None]
    assert len(starts) >= (3 if CASES[number][1] == "fixed" else 1)
    # Only rows of the disk are; the rank that holds the first live block reads them.
    read_ahead = sum(seen["read_ahead"] for seen in cached)
    assert (read_ahead > 0) == (DISK.items() <= CASES[number][3].items())
    if CASES[number][1] == "linear":
        # Batches began at the end of the shallower front and were kept at the deeper one.
        assert sum(start is not None and keeps for start, keeps in cached[0]["starts"]) > 0
    assert [seen["warnings"] for seen in cached] == [seen["warnings"] for seen in plain]


def resumed(name, folder, saved, settings, *, cached):
    more = {
        **SAVED,
        **settings,
        **resumed_from(str(saved / "checkpoint" / f"step-{RESUMED_AT}")),
    }
    return scenario(
        name, folder, 1, "fixed", "1F1B", more, cached=cached, fixed_weights=False, save_at=[]
    )  # fmt: skip


def test_a_run_goes_on_with_a_warm_a_cold_a_damaged_and_a_deleted_cache(folder):
    kept = {**SAVED, **DISK, "freezing__cache__folder": str(folder / "rows")}
    saves = scenario(
        "saves", folder, 1, "fixed", "1F1B", kept, cached=True, save_at=[RESUMED_AT]
    )  # fmt: skip
    (first,) = run_scenarios(folder / "saves", 1, [saves]).values()
    saved, rows = folder / "saves" / "saves", folder / "rows"
    files = sorted(rows.rglob("*.safetensors"))
    assert len(files) == N_ROWS
    for name in ("warm", "damaged", "none"):
        shutil.copytree(rows, folder / f"rows {name}")
    for file in (folder / "rows damaged").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-5])
    scenarios = [
        resumed(
            name,
            folder,
            saved,
            {**DISK, "freezing__cache__folder": str(folder / f"rows {name}")},
            cached=name != "none",
        )
        for name in ("none", "warm", "damaged", "deleted")
    ]
    found = run_scenarios(folder / "resumed", 1, scenarios)
    for name in ("warm", "damaged", "deleted"):
        assert_same(found["none"], found[name])
        assert found[name][0]["losses"] == first[0]["losses"][-(STEPS - RESUMED_AT) :]
    # Three batches are computed in any case. Step 12 ends an epoch and 13 to 15 make the next, so
    # without files the last step is the first that finds all its rows.
    entered = {
        name: sum(start is not None for start, _ in found[name][0]["starts"])
        for name in ("warm", "damaged", "deleted")
    }
    assert entered == {"warm": 2, "deleted": 1, "damaged": 0}
    told = [warning for seen in found["damaged"] for warning in seen["warnings"]]
    assert len([warning for warning in told if "cannot be used" in warning]) == 1
