"""Links between real ranks are timed, land in the bounds, and are the same for all ranks."""

import json

import pytest
from launcher import arguments, asked_for, run_scenarios
from saving import SAVED, resumed_from

# Which ranks send each other something, worked out by hand for four ranks.
LINE = {"0>1", "1>0", "1>2", "2>1", "2>3", "3>2"}
CASES = {
    "1F1B": ("1F1B", {}, LINE),
    # Stages are dealt out in turn: stage 4 lies on rank 0, behind stage 3 on rank 3.
    "Interleaved1F1B": ("Interleaved1F1B", {}, LINE | {"0>3", "3>0"}),
    # Stages go there and back: 3 and 4 lie on rank 3, and what comes back takes the same links.
    "ZBVZeroBubble": ("ZBVZeroBubble", {}, LINE),
    # Two pipelines of two ranks each, whose process groups are parts of the whole.
    "sharded": ("1F1B", {"parallelism__data_parallel_shard_degree": 2}, {"0>1", "1>0"}),
    "sharded V": ("ZBVZeroBubble", {"parallelism__data_parallel_shard_degree": 2}, {"0>1", "1>0"}),
    "hybrid": (
        "1F1B",
        {
            "parallelism__data_parallel_shard_degree": 2,
            "freezing__method": "timelyfreeze+apf",
            "freezing__apf__check_interval": 1,
        },
        {"0>1", "1>0"},
    ),
}
# What the suite has; the one that is resumed takes longer than all others.
SHORT = ("ZBVZeroBubble", "sharded")
NAMES = [pytest.param(case, marks=[] if case in SHORT else [pytest.mark.long]) for case in CASES]
MEASURED = 4
# Two rows of 32 tokens, 64 wide, in float32; both stages of a rank send as much.
MESSAGE_BYTES = 2 * 32 * 64 * 4


def scenario(name, schedule, save_at=(), **more):
    keys = {
        "model__flavor": "tiny",
        "parallelism__pipeline_parallel_schedule": schedule,
        "training__steps": 6,
        "freezing__method": "timelyfreeze",
        "freezing__last_warmup_step": 2,
        "freezing__last_monitor_step": MEASURED,
        "freezing__last_ramp_step": 5,
        "freezing__discard_batches": 0,
        **SAVED,
        **more,
    }
    if "parallelism__pipeline_parallel_degree" not in keys:
        replicas = [n for key, n in keys.items() if "data_parallel" in key]
        keys["parallelism__pipeline_parallel_degree"] = 2 if replicas else 4
    return {"name": name, "save_at": list(save_at), "args": arguments(**keys)}


def resumed(folder, name, step):
    saved = folder / "whole" / "checkpoint" / f"step-{step}"
    return scenario(
        name,
        "1F1B",
        **resumed_from(saved),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("transfers")


@pytest.fixture(scope="module")
def runs(request, folder):
    asked = {case: CASES[case] for (case,) in asked_for(request, "case")}
    scenarios = [scenario(name, schedule, **more) for name, (schedule, more, _) in asked.items()]
    return run_scenarios(folder, 4, scenarios, timeout_s=600)


@pytest.fixture(scope="module")
def stopped(folder):
    scenarios = [scenario("whole", "1F1B", save_at=(3, 5))]
    scenarios += [resumed(folder, "before", 3), resumed(folder, "after", 5)]
    return run_scenarios(folder, 4, scenarios)


@pytest.mark.parametrize("case", NAMES)
def test_every_link_is_timed_both_ways_and_all_ranks_agree(runs, case):
    first, *others = [seen["p2p_latency_ms"] for seen in runs[case]]
    assert set(first) == CASES[case][2]
    assert all(0.0 < ms < 1000.0 for ms in first.values())
    for link, ms in first.items():
        assert first[">".join(reversed(link.split(">")))] == ms
    assert all(other == first for other in others)
    assert all(seen["plan"] == runs[case][0]["plan"] for seen in runs[case])


@pytest.mark.parametrize("case", NAMES)
def test_messages_have_the_size_of_what_stages_send(runs, case):
    sizes = {stage: n for seen in runs[case] for stage, n in seen["message_bytes"].items()}
    last = max(sizes)
    assert sizes.pop(last) == 0
    assert set(sizes.values()) == {MESSAGE_BYTES}


@pytest.mark.parametrize("case", SHORT)
def test_they_are_kept_beside_the_run(runs, case, folder):
    (path,) = (folder / case).glob("tb/*/bounds.json")
    assert json.loads(path.read_text())["p2p_latency_ms"] == runs[case][0]["p2p_latency_ms"]


@pytest.mark.long
def test_a_resumed_run_keeps_what_was_measured_or_measures_itself(stopped):
    whole, after, before = (
        stopped[name][0]["p2p_latency_ms"] for name in ("whole", "after", "before")
    )
    assert after == whole
    assert set(before) == set(whole)
    assert before != whole
    for name in ("after", "before"):
        (latency_ms, *others) = [seen["p2p_latency_ms"] for seen in stopped[name]]
        assert all(other == latency_ms for other in others)
