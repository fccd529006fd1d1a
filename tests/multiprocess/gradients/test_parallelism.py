"""Pipelines whose stages are replicated, sharded or split within tensors train as plain ones do.

Replicas with microbatches of one row see together what a single pipeline sees with larger ones (see
``test_hybrid``); tensor parallelism changes nothing of what is seen.
"""

import pytest
from hybrids import CASES, SETTINGS, Case, parametrized
from launcher import merged
from one_process import model_of
from test_hybrid import rows_seen

# The pipeline of two processes that sees the rows of as many replicas.
PLAIN = {1: "alone", 2: "alone, 2 rows", 4: "alone, 4 rows"}
COMPARED = [
    pytest.param(
        case,
        Case(PLAIN[case.kind.n_replicas], case.schedule),
        id=case.name,
        marks=[pytest.mark.long] if case.is_long else [],
    )
    for case in CASES
    if case.schedule in ("1F1B", "ZBVZeroBubble")
    and case.kind.n_processes > 2
    and case.precision == "fp32"
    and case.recompute == "none"
]


@pytest.mark.parametrize("case", parametrized(CASES))
def test_all_processes_of_a_stage_freeze_the_same(hybrid_runs, case):
    masks = {}
    for seen in hybrid_runs.of(case):
        for step, stage, mask in seen["masks"]:
            masks.setdefault((step, stage), []).append(mask)
    assert any(any(mask.values()) for alike in masks.values() for mask in alike)
    for alike in masks.values():
        assert len(alike) == case.kind.n_processes // 2
        assert all(mask == alike[0] for mask in alike)


@pytest.mark.parametrize(("case", "plain_case"), COMPARED)
def test_training_equals_a_plain_pipelines(hybrid_runs, case, plain_case):
    """Plan, and weights after steps of all phases, relative to how far they have moved."""
    several, plain = hybrid_runs.of(case), hybrid_runs.of(plain_case)
    assert rows_seen(several) == rows_seen(plain)
    assert several[0]["plan"] == plain[0]["plan"]
    assert any(ratio > 0 for ratio in plain[0]["plan"].values())
    start = model_of(SETTINGS["training__seq_len"]).state_dict()
    right = merged(plain, "weights")
    assert merged(several, "weights").keys() == right.keys() == start.keys()
    for seen in several:
        for name, weight in seen["weights"].items():
            moved = float((right[name] - start[name]).norm())
            difference = float((weight - right[name]).norm())
            assert difference < 1e-3 * moved, f"{name}: {difference / moved:.1e} of its way"
