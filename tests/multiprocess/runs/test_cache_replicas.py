"""Replicas that read what the frozen front puts out learn what those learn that compute it.

As in ``test_cache``, to the last bit. Each data-parallel rank has the same rows in every epoch; the
run to compare with has them too, and no room to keep what the front puts out for any.
"""

import shutil
from itertools import chain

import pytest
from launcher import ROOT, arguments, asked_for, assert_same, run_scenarios
from saving import SAVED, resumed_from

# Six or three steps make an epoch, of two or four replicas. One row is left over: it goes to each
# replica in turn.
N_ROWS, STEPS = 49, 20
RESUMED_AT = 14
NO_ROOM = {"freezing__cache__memory_gib": 1e-9}
DISK = {"freezing__cache__memory_gib": 0, "freezing__cache__disk_gib": 1}
SHARDED = {"parallelism__data_parallel_shard_degree": 2}
REPLICATED = {**SHARDED, "parallelism__data_parallel_replicate_degree": 2}
GROWING = {
    "freezing__method": "linear",
    "freezing__linear__check_interval": 12,
    "training__steps": 40,
}
# Name: number of processes and settings. The front of 5 blocks ends in the middle of a stage.
CASES = {
    "GPipe": (4, SHARDED),
    "1F1B": (4, SHARDED),
    "1F1B resharded": (4, {**SHARDED, "parallelism__fsdp_reshard_after_forward": "always"}),
    "ZBVZeroBubble": (4, SHARDED),
    "DualPipeV": (4, SHARDED),
    "a front that grows": (4, {**SHARDED, **GROWING}),
    "a front that ends with a stage": (4, {**SHARDED, "freezing__fixed__layers": 4}),
    "bf16": (4, {**SHARDED, "training__mixed_precision_param": "bfloat16"}),
    "replicated": (8, {**REPLICATED, "training__steps": 16}),
}
NAMES = [pytest.param(n, marks=pytest.mark.long) for n in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    (folder / "data").mkdir()
    lines = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "train.jsonl").write_text("".join(lines[:N_ROWS]))
    return folder


def scenario(name, folder, settings, *, cached=True, **more):
    every = {
        "model__flavor": "tiny",
        "training__dataset": "alpaca",
        "training__dataset_path": str(folder / "data"),
        "training__seq_len": 128,
        "training__local_batch_size": 4,
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "training__steps": STEPS,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        "freezing__method": "fixed",
        "freezing__last_warmup_step": 2,
        "freezing__fixed__layers": 5,
        **settings,
        **({"freezing__cache__enable": None} if cached else {}),
    }
    if not cached:
        every = {key: value for key, value in every.items() if "__cache__" not in key}
    return {"name": name, "module": "always_reads", "args": arguments(**every), **more}


def settings_of(name):
    schedule = name.split()[0]
    is_named = schedule in ("GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV")
    return {
        **CASES[name][1],
        **({"parallelism__pipeline_parallel_schedule": schedule} if is_named else {}),
    }


@pytest.fixture(scope="module")
def runs(request, folder):
    """{name of a case: (ranks that keep nothing, ranks that do)}."""
    chosen = [name for (name,) in asked_for(request, "name")]
    seen = {}
    for n_processes in sorted({CASES[name][0] for name in chosen}):
        mine = [name for name in chosen if CASES[name][0] == n_processes]
        scenarios = [
            scenario(f"{name}, {room}", folder, {**settings_of(name), **rooms})
            for name in mine
            for room, rooms in (("no room", NO_ROOM), ("room", {}))
        ]
        found = run_scenarios(folder / f"{n_processes}", n_processes, scenarios, timeout_s=900)
        seen |= {name: (found[f"{name}, no room"], found[f"{name}, room"]) for name in mine}
    return seen


def n_entered(ranks):
    return sum(start is not None for start, _ in ranks[0]["starts"])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned_is_the_same_to_the_last_bit(runs, name):
    computed, read = runs[name]
    assert_same(computed, read)
    assert n_entered(computed) == 0
    # All processes begin the same batches behind the front. Without parts none would be read
    # before the third epoch, and hardly any in it.
    assert all(seen["starts"] == read[0]["starts"] for seen in read)
    assert n_entered(read) >= 4
    if name == "a front that grows":
        # Batches began at the end of the shallower front and were kept at the deeper one.
        assert any(start is not None and keeps for start, keeps in read[0]["starts"])
    assert [seen["warnings"] for seen in read] == [seen["warnings"] for seen in computed]


@pytest.mark.long
def test_a_run_goes_on_with_a_warm_and_a_deleted_cache_without_one_and_with_fewer_replicas(folder):
    def kept_in(name):
        return {**SAVED, **DISK, "freezing__cache__folder": str(folder / name)}

    saves = scenario("saves", folder, {**SHARDED, **kept_in("rows")}, save_at=[RESUMED_AT])
    (first,) = run_scenarios(folder / "saves", 4, [saves]).values()
    # All replicas keep their rows in one place, also the one that goes in turn.
    rows = [file.stem for file in (folder / "rows").rglob("*.safetensors")]
    assert sorted(rows, key=int) == list(map(str, range(N_ROWS)))

    saved = folder / "saves" / "saves" / "checkpoint" / f"step-{RESUMED_AT}"
    goes_on = resumed_from(str(saved))
    shutil.copytree(folder / "rows", folder / "rows warm")
    names = ("warm", "deleted", "off")
    scenarios = [
        scenario(
            name,
            folder,
            {**SHARDED, **kept_in(f"rows {name}"), **goes_on},
            cached=name != "off",
            fixed_weights=False,
            save_at=[],
        )
        for name in names
    ]
    found = run_scenarios(folder / "resumed", 4, scenarios)
    for name in ("warm", "deleted"):
        assert_same(found["deleted"], found[name])
        assert found[name][0]["losses"] == first[0]["losses"][RESUMED_AT:]
    # Three batches are computed in any case; the next three find what was kept before.
    assert (n_entered(found["warm"]), n_entered(found["deleted"])) == (3, 0)

    alone = {
        **kept_in("rows warm"),
        **goes_on,
        "training__local_batch_size": 8,
        "parallelism__pipeline_parallel_microbatch_size": 2,
    }
    smaller = scenario("smaller", folder, alone, fixed_weights=False, save_at=[])
    (found["smaller"],) = run_scenarios(folder / "smaller", 2, [smaller]).values()
    # It reads what two replicas kept, whose tensors were in shards.
    assert n_entered(found["smaller"]) == 3
    # The epoch that was begun ends with the same rows in the same steps, whoever reads them.
    n_steps = 3 * N_ROWS // 8 - RESUMED_AT
    assert n_steps == 4
    for name in ("off", "smaller"):
        assert rows_of(found[name])[:n_steps] == rows_of(first)[RESUMED_AT:][:n_steps]
        assert len(set(chain.from_iterable(rows_of(found[name])[n_steps:]))) == 2 * 8


def rows_of(ranks):
    """Return the rows of all replicas in each step, sorted."""
    replicas = {tuple(seen["batches"][0][0].tolist()): seen for seen in ranks}.values()
    steps = zip(*(seen["batches"] for seen in replicas), strict=True)
    return [sorted(tuple(row) for batch in step for row in batch.tolist()) for step in steps]
