"""Gradients of a pipeline that freezes, under every kind of parallelism, are one process's.

The one process has the weights that the last step began with, the rows of all replicas, and the
masks that the ranks recorded; it leaves out what was frozen after the fact, microbatch by
microbatch (``one_process.py``). Replicas with microbatches of one row see together what a single
pipeline sees with larger ones (see ``test_hybrid``); tensor parallelism changes nothing of what is
seen.
"""

from functools import cache

import pytest
from hybrids import CASES, LOW_RANK, N_MICROBATCHES, SETTINGS, Case, parametrized
from launcher import merged
from one_process import frozen_in, gradients_by_microbatch, masked_sum, model_of, rows_of
from test_hybrid import rows_seen

# Largest difference of a tensor's gradient, relative to its norm. One process does the same
# products of the same rows in the same order, so that only sums over microbatches and replicas may
# round otherwise: in fp32 by 6e-8 each, in bf16, in which FSDP adds up the weight passes of a split
# backward, by 2e-3. Tensor parallelism cuts the sums of every product in two, in each layer, in the
# forward and in the backward. The gradients of queries and keys feel it most: they are small
# differences of large terms. They feel that the loss of learned tokens rounds otherwise than
# torch's, by up to 3e-6, though both are as far from float64. A 16-bit stage adds up weight
# gradients in fp32, one process with weights in bf16 rounds each microbatch's: up to 8.0e-3 apart.
# The tolerance of float8 with split tensors follows from nothing: it lies
# above what was seen here. Roundings of 1e-7 fall to the other side of a float8's boundaries,
# and even one process moves by 0.1 to 0.2 with them (docs/parallelism.md).
TOLERANCES = {
    # (precision, tensors split)
    ("fp32", False): 4e-6,
    ("fp32", True): 2e-5,
    ("bf16", False): 1e-2,
    ("bf16", True): 8e-2,
    ("float8", False): 1e-6,
    ("float8", True): 9e-2,
}


def tolerance(case):
    return TOLERANCES[case.precision, case.kind.n_tp > 1]


class Compared:
    """What a run had beside what one process has for it."""

    def __init__(self, case, ranks):
        self.ranks = ranks
        self.frozen = frozen_in(ranks)
        weights, replicas = merged(ranks, "weights_before"), rows_of(ranks, case.kind)
        self.full = gradients_by_microbatch(weights, replicas, "fp32")
        self.same = self.full
        if case.precision != "fp32":
            self.same = gradients_by_microbatch(
                weights,
                replicas,
                case.precision,
                cast_weights=case.kind.is_sharded or case.kind.n_tp == 1,
            )


@pytest.fixture(scope="module")
def compared(hybrid_runs):
    return cache(lambda case: Compared(case, hybrid_runs.of(case)))


def relative_difference(gradient, expected):
    return float((gradient - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", parametrized(CASES))
def test_gradients_equal_those_of_one_process(compared, case):
    both = compared(case)
    for seen in both.ranks:
        for name, gradient in seen["gradients"].items():
            expected = masked_sum(both.same[name], both.frozen[name])
            assert (gradient is None) == (expected is None), f"{name}: nothing to update it by"
            if gradient is not None:
                difference = relative_difference(gradient, expected)
                assert difference < tolerance(case), f"{name}: {difference:.1e}"
        assert seen["recomputes"] == (case.recompute != "none")
    # Every tensor was compared, and most were frozen in some microbatches and not in others.
    assert merged(both.ranks, "gradients").keys() == both.frozen.keys() == both.same.keys()
    assert sum(0 < sum(mask) < N_MICROBATCHES for mask in both.frozen.values()) > 10


@pytest.mark.parametrize("case", parametrized(CASES))
def test_one_wrong_mask_would_show(compared, case):
    """Each tensor's gradient moves by more than twice the tolerance with each of its masks."""
    both = compared(case)
    for name, mask in both.frozen.items():
        right = masked_sum(both.same[name], mask)
        for microbatch in range(N_MICROBATCHES):
            wrong_mask = [f != (m == microbatch) for m, f in enumerate(mask)]
            wrong = masked_sum(both.same[name], wrong_mask)
            if right is not None and wrong is not None:
                assert relative_difference(right, wrong) > 2 * tolerance(case), name


@pytest.mark.parametrize("case", parametrized(case for case in CASES if case.precision != "fp32"))
def test_low_precision_is_really_used(compared, case):
    both = compared(case)
    gradients = merged(both.ranks, "gradients")
    differences = [
        relative_difference(gradient, masked_sum(both.full[name], both.frozen[name]))
        for name, gradient in gradients.items()
        if gradient is not None
    ]
    assert min(differences) > 1e-3


# The pipeline of two processes that sees the rows of as many replicas.
PLAIN = {1: "alone", 2: "alone, 2 rows", 4: "alone, 4 rows"}
COMPARED = [
    pytest.param(
        case,
        Case(PLAIN[case.kind.n_replicas], case.schedule, rank=case.rank),
        id=case.name,
        marks=[pytest.mark.long] if case.is_long else [],
    )
    for case in (*CASES, *LOW_RANK)
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
