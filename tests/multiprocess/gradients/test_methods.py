"""Every freezing method trains through all its phases on every schedule.

The ranks are emulated; ``test_emulation.py`` has each method on real ones too.
"""

import math
from itertools import pairwise

import pytest
import torch
from launcher import SCHEDULES, merged
from method_runs import REFERENCE
from methods import ROW, ROWS, STEPS

METHODS = [row.method for row in ROWS]


# What is not marked long: policies on the schedule that decisions are compared with, and with a
# plan on one that splits its backwards. ``test_phases.py`` has a plan alone on other schedules.
def is_short(method, schedule):
    return schedule == ("ZBVZeroBubble" if ROW[method].plans else REFERENCE)


def cases(methods):
    return [
        pytest.param(
            method,
            schedule,
            id=f"{method} {schedule}",
            marks=[] if is_short(method, schedule) else [pytest.mark.long],
        )
        for method in methods
        for schedule in SCHEDULES
    ]


UNPLANNED = [row.method for row in ROWS if not row.plans]


def frozen_by_step(ranks):
    """Return {step: {(stage, microbatch): mask}} over all ranks."""
    together = {}
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            for microbatch, mask in masks.items():
                together.setdefault(step, {})[stage, microbatch] = mask
    return together


@pytest.mark.parametrize(("method", "schedule"), cases(METHODS))
def test_a_method_trains_through_all_its_phases(method_runs, method, schedule):
    ranks = method_runs[f"{method} {schedule}"]
    assert all(seen["step"] == STEPS for seen in ranks)
    losses = next(seen["losses"] for seen in ranks if seen["losses"][0] != -1.0)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    frozen = frozen_by_step(ranks)
    assert not frozen.keys() & {1, 2}, "warm-up freezes nothing"
    stable = [mask for step in range(10, STEPS + 1) for mask in frozen.get(step, {}).values()]
    assert any(any(mask) for mask in stable)
    n_backwards = sum(len(seen["sizes"]) for seen in ranks) * (8 if schedule == "DualPipeV" else 4)
    live = [mask for mask in stable if not all(mask)]
    assert live or len(stable) < 4 * n_backwards, "something is trained"
    if ROW[method].plans:
        assert {3, 4}.isdisjoint(frozen)
        for step in (5, 6):
            assert len(frozen[step]) == n_backwards
            assert all(all(mask) for mask in frozen[step].values())
        assert sum(ranks[0]["plan"].values()) > 0.0
    else:
        assert "plan" not in ranks[0]


# All policies are compared on all schedules, one of them not only in the long tests.
OTHERS = [
    pytest.param(
        method,
        schedule,
        marks=[] if (method, schedule) == ("apf", "ZBVZeroBubble") else [pytest.mark.long],
    )
    for method in UNPLANNED
    for schedule in SCHEDULES
    if schedule != REFERENCE
]


@pytest.mark.parametrize(("method", "schedule"), OTHERS)
def test_a_policy_decides_alike_on_all_ranks_and_schedules(method_runs, method, schedule):
    """Scores are global: how the model is cut and in which order it runs must not matter."""
    reference, ranks = method_runs[f"{method} {REFERENCE}"], method_runs[f"{method} {schedule}"]
    weights = merged(reference, "weights")
    for seen in ranks:
        assert seen["decided"] == reference[0]["decided"]
    for name, tensor in merged(ranks, "weights").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("method", [row.method for row in ROWS if row.monotone])
def test_what_is_frozen_once_stays_frozen(method_runs, method):
    decided = [set(names) for _, names in method_runs[f"{method} {REFERENCE}"][0]["decided"]]
    assert all(before <= after for before, after in pairwise(decided))
    assert decided[-1]


@pytest.mark.parametrize("method", [row.method for row in ROWS if row.prefix])
def test_what_is_frozen_is_the_front_of_the_model(method_runs, method):
    names = list(merged(method_runs[f"{method} {REFERENCE}"], "weights"))
    layers = sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})
    for _, frozen in method_runs[f"{method} {REFERENCE}"][0]["decided"]:
        frozen_layers = [i for i in layers if any(n.startswith(f"layers.{i}.") for n in frozen)]
        assert frozen_layers == layers[: len(frozen_layers)]
        expected = {n for n in names if any(n.startswith(f"layers.{i}.") for i in frozen_layers)}
        if frozen_layers:
            expected.add("tok_embeddings.weight")
        assert set(frozen) == expected


@pytest.mark.parametrize(("method", "schedule"), cases(UNPLANNED))
def test_frozen_tensors_do_not_move(method_runs, method, schedule):
    """The last step froze what it said: those tensors have no gradient, all others have one."""
    ranks = method_runs[f"{method} {schedule}"]
    _, frozen = ranks[0]["decided"][-1]
    gradients = merged(ranks, "gradients")
    assert {name for name, grad in gradients.items() if grad is None} == set(frozen)


@pytest.mark.parametrize(
    ("method", "schedule"), cases(["timelyfreeze+apf", "timelyfreeze+autofreeze"])
)
def test_a_plan_trims_or_fills_the_policys_choice(method_runs, method, schedule):
    """Algorithm 2: what is frozen contains the policy's choice or is contained in it."""
    ranks = method_runs[f"{method} {schedule}"]
    decided = dict(ranks[0]["decided"])
    relations = set()
    for seen in ranks:
        for step, stage, masks in seen["masks"]:
            if step <= 6 or stage == 0:
                continue
            chosen = set(decided[step]) & set(seen["names"][stage])
            for mask in masks.values():
                frozen = {n for n, f in zip(seen["names"][stage], mask, strict=True) if f}
                assert chosen <= frozen or frozen <= chosen
                relations.add((chosen < frozen, frozen < chosen))
    assert relations - {(False, False)}, "the plan asked for more or less than the policy"
