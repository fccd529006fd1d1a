"""Runs whose frozen front works ahead learn what runs without it learn.

Weights and losses are compared to the last bit, in float32. No live stage ends a batch before the
front has forwarded the next one, wherever it may (``waits_for_front.py``): where it was not ahead,
these runs would fail.
"""

import itertools

import pytest
import torch
from faults import equal_weights, run_with
from launcher import arguments, asked_for, assert_same, merged, run_scenarios
from methods import ROW
from saving import SAVED, resumed_from

STEPS, RESUMED_AT = 10, 6
VALIDATED = {
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
    "validation__local_batch_size": 8,
    "validation__seq_len": 48,
    "validation__freq": 4,
    "validation__steps": 2,
}
TWO_BATCHES = {
    "training__global_batch_size": 16,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}
PACKED = {"data__packing": None}
BFLOAT16 = {"training__mixed_precision_param": "bfloat16"}
METHODS = {
    "fixed": {"freezing__fixed__layers": 5},
    # Checks after steps 5 and 8: 4 layers, then 7.
    "linear": {"freezing__linear__check_interval": 3, "freezing__linear__layers_per_check": 4},
    # Checks after steps 4, 6, 8 and 10; the second is the first that has something to compare.
    "smartpipe": {
        "freezing__smartpipe__check_interval": 2,
        "freezing__smartpipe__tau": 1e9,
        "freezing__smartpipe__rate": 0.6,
    },
    # All but the last module are frozen one by one, the fourth layer after step 22.
    "egeria": {
        **ROW["egeria"].settings,
        "freezing__egeria__check_interval": 2,
        "freezing__egeria__unfreeze_at": 0.0,
        "training__steps": 28,
    },
    # A front of 4 layers is frozen after steps 4 and 8, and learns again after step 6.
    "thawing": {},
}
# Step 1 is the first of the process, and up to step 2 nothing is frozen.
ALL_STEPS = set(range(3, STEPS))
# Processes, method, schedule, settings, and in which steps the front goes on with the next.
CASES = [
    (2, "fixed", "GPipe", {}, ALL_STEPS),
    (2, "fixed", "1F1B", {}, ALL_STEPS),
    (4, "fixed", "GPipe", {}, ALL_STEPS),
    (4, "fixed", "1F1B", {}, ALL_STEPS),
    (2, "linear", "GPipe", {}, {6, 7, 9}),
    (4, "linear", "1F1B", {}, {6, 7, 9}),
    (2, "smartpipe", "1F1B", {}, {7, 9}),
    (2, "thawing", "GPipe", {}, {5, 9}),
    (2, "egeria", "1F1B", {}, {23, 25, 27}),
    (2, "fixed", "1F1B", TWO_BATCHES, ALL_STEPS),
    (4, "fixed", "GPipe", TWO_BATCHES, ALL_STEPS),
    (2, "fixed", "1F1B", PACKED, ALL_STEPS),
    (2, "fixed", "GPipe", VALIDATED, ALL_STEPS - {4, 8}),
    (4, "fixed", "1F1B", VALIDATED, ALL_STEPS - {4, 8}),
    (2, "fixed", "1F1B", BFLOAT16, ALL_STEPS),
]
LONG = {0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14}
NUMBERS = [
    pytest.param(number, marks=[pytest.mark.long] if number in LONG else [])
    for number in range(len(CASES))
]


def scenario(name, n_processes, method, schedule, settings, *, ahead, **more):
    every = {
        "model__flavor": "tiny",
        "training__dataset": "alpaca",
        "training__dataset_path": "tests/assets/tiny_instruct",
        "training__seq_len": 128,
        "training__steps": STEPS,
        "parallelism__pipeline_parallel_degree": n_processes,
        "parallelism__pipeline_parallel_schedule": schedule,
        "freezing__method": method,
        "freezing__last_warmup_step": 2,
        **METHODS[method],
        **settings,
        **({"freezing__run_ahead": None} if ahead else {}),
    }
    return {"name": name, "module": "thawing_policy", "args": arguments(**every), **more}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """{number of a case: (ranks without, ranks whose front works ahead)}."""
    folder = tmp_path_factory.mktemp("ahead")
    chosen = [number for (number,) in asked_for(request, "number")]
    seen = {}
    for n_processes in sorted({CASES[number][0] for number in chosen}):
        mine = [number for number in chosen if CASES[number][0] == n_processes]
        scenarios = [
            scenario(f"{number} {ahead}", *CASES[number][:4], ahead=ahead)
            for number, ahead in itertools.product(mine, (False, True))
        ]
        found = run_scenarios(folder / f"{n_processes}", n_processes, scenarios, timeout_s=900)
        seen |= {n: (found[f"{n} False"], found[f"{n} True"]) for n in mine}
    return seen


def assert_same_rows(plain, ahead):
    assert_same(plain, ahead)
    for a, b in zip(plain, ahead, strict=True):
        assert a["n_tokens"] == b["n_tokens"]
        assert a["decided"] == b["decided"]


@pytest.mark.parametrize("number", NUMBERS)
def test_run_ahead_learns_the_same_to_the_last_bit(runs, number):
    plain, ahead = runs[number]
    assert_same_rows(plain, ahead)
    assert all(seen["ahead"] == ahead[0]["ahead"] for seen in ahead)
    steps = {step for step, _, goes_on in ahead[0]["ahead"] if goes_on}
    assert steps == CASES[number][4]


def assert_goes_on(first, resumed):
    """Assert that a resumed run ends as the one that it goes on from."""
    for a, b in zip(first, resumed, strict=True):
        assert a["losses"][RESUMED_AT:] == b["losses"]
        assert (a["n_tokens"], a["step"]) == (b["n_tokens"], b["step"])
    before, after = merged(first, "weights"), merged(resumed, "weights")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_resumed_run_comes_to_the_same_weights_with_and_without(tmp_path):
    def of(name, *, ahead, settings, **more):
        return scenario(name, 2, "fixed", "1F1B", {**SAVED, **settings}, ahead=ahead, **more)

    saves = of("saves", ahead=True, settings={}, save_at=[RESUMED_AT])
    (first,) = run_scenarios(tmp_path / "saved", 2, [saves]).values()
    steps = {step for step, _, goes_on in first[0]["ahead"] if goes_on}
    assert steps == ALL_STEPS - {RESUMED_AT}
    saved = tmp_path / "saved" / "saves" / "checkpoint" / f"step-{RESUMED_AT}"
    goes_on = resumed_from(saved)
    scenarios = [
        of(name, ahead=ahead, settings=goes_on, fixed_weights=False, save_at=[])
        for name, ahead in {"without": False, "with": True}.items()
    ]
    for resumed in run_scenarios(tmp_path / "resumed", 2, scenarios).values():
        assert_goes_on(first, resumed)


def test_a_stop_while_the_front_is_ahead_loses_no_row(tmp_path):
    """It is known to all ranks one step later, when the front has begun with the one after."""
    settings = {
        "model__flavor": "tiny",
        "checkpoint__interval": 99,
        "freezing__method": "fixed",
        "freezing__fixed__layers": 5,
        "freezing__last_warmup_step": 2,
    }
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    assert run_with({}, undisturbed, **settings).status == 0
    signal = {"step": 5, "rank": 0, "to": "agent", "signal": "SIGTERM"}
    ended = run_with(signal, stopped, freezing__run_ahead=None, **settings)
    assert ended.status != 0
    assert ended.left == []
    (saved,) = (path.name for path in (stopped / "checkpoint").iterdir())
    # The front is in step 5 at once: the signal may find the live stage still in step 4.
    assert saved in ("step-5", "step-6")
    assert run_with({}, stopped, freezing__run_ahead=None, **settings).status == 0
    assert equal_weights(stopped, undisturbed)
