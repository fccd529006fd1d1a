"""Gradients of a pipeline equal those of one process, on every schedule and in every precision."""

import pytest
import torch
from launcher import SCHEDULES, arguments, merged, run_scenarios

ONE = {"parallelism__pipeline_parallel_degree": 1, "model__flavor": "tiny"}
# With full and with split backwards; they come last, since what is imported stays.
AGAIN = ["1F1B", "ZBVZeroBubble"]
BF16 = {"training__mixed_precision_param": "bfloat16"}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run_scenarios(
        tmp_path_factory.mktemp("single"),
        1,
        [
            {"name": "fp32", "args": arguments(**ONE)},
            {"name": "autocast", "args": arguments(**ONE, **BF16)},
            {"name": "bf16", "args": arguments(**ONE, **BF16, training__dtype="bfloat16")},
            {
                "name": "32 rows",
                "args": arguments(**ONE, training__local_batch_size=32),
            },
        ],
    )


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    scenarios = [
        {
            "name": schedule,
            "args": arguments(
                model__flavor="tiny", parallelism__pipeline_parallel_schedule=schedule
            ),
        }
        for schedule in SCHEDULES
    ]
    scenarios += [
        {"name": "autocast", "args": arguments(model__flavor="tiny", **BF16)},
        {
            "name": "bf16",
            "args": arguments(model__flavor="tiny", **BF16, training__dtype="bfloat16"),
        },
        {
            "name": "1 accumulation step",
            "args": arguments(
                model__flavor="tiny",
                training__local_batch_size=32,
                parallelism__pipeline_parallel_microbatch_size=4,
            ),
        },
        {
            "name": "4 accumulation steps",
            "args": arguments(model__flavor="tiny", training__global_batch_size=32),
        },
        {
            "name": "upstream",
            "upstream": True,
            "args": arguments(
                training__dataloader__num_workers=0,  # ours has -1, which upstream does not know
                model__flavor="debugmodel",  # which upstream knows
                training__dataset="c4_test",
                training__dataset_path="tests/assets/c4_test",
            ),
        },
        {
            "name": "none",
            "args": arguments(
                model__flavor="debugmodel",  # which upstream knows
                training__dataset="c4_test",
                training__dataset_path="tests/assets/c4_test",
            ),
        },
    ]
    scenarios += [
        {
            "name": f"{schedule} in parts",
            "module": "again_in_parts",
            "args": arguments(
                model__flavor="tiny", parallelism__pipeline_parallel_schedule=schedule
            ),
        }
        for schedule in AGAIN
    ]
    return run_scenarios(tmp_path_factory.mktemp("pipelined"), 4, scenarios)


def assert_equal_gradients(left, right, *, relative):
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name].float(), right[name].float()
        error = float((a - b).norm() / b.norm())
        assert error < relative, f"{name}: relative difference {error:.2e}"


def loss_of(ranks):
    losses = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    assert len(losses) == 1, "exactly one rank has the loss"
    return losses[0]


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(f"{s} in parts" for s in AGAIN)])
def test_gradients_equal_those_of_one_process(single, pipelined, schedule):
    reference = single["fp32"][0]
    assert_equal_gradients(
        merged(pipelined[schedule], "gradients"), reference["gradients"], relative=1e-5
    )
    assert loss_of(pipelined[schedule]) == pytest.approx(reference["losses"], rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logged_gradient_norm_is_that_of_the_mean_loss(single, pipelined, schedule):
    (_, expected), *_ = single["fp32"][0]["grad_norms"]
    for seen in pipelined[schedule]:
        assert seen["grad_norms"] == [(1, pytest.approx(expected, rel=1e-5))]


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_low_precision_is_really_used_under_a_pipeline(single, pipelined, precision):
    """Rounding to bf16 leaves its mark: near one process in bf16, and visibly off fp32.

    Were it used nowhere, the two distances would be alike; by processor it is half of one.
    """
    ours = merged(pipelined[precision], "gradients")
    # Copies of weights in bf16 are what weights in bf16 are.
    low, full = single["bf16"][0]["gradients"], single["fp32"][0]["gradients"]

    def distance(reference):
        together = [(ours[n].float() - reference[n].float()).flatten() for n in ours]
        return float(
            torch.cat(together).norm() / torch.cat([full[n].flatten() for n in ours]).norm()
        )

    assert distance(full) > 1e-3
    assert distance(low) < 0.7 * distance(full)


def test_dtype_bfloat16_keeps_weights_and_gradients_in_bfloat16(pipelined):
    for seen in pipelined["bf16"]:
        assert {w.dtype for w in seen["weights"].values()} == {torch.bfloat16}
        assert {g.dtype for g in seen["gradients"].values()} == {torch.bfloat16}


def test_four_accumulation_steps_equal_one(single, pipelined):
    once = merged(pipelined["1 accumulation step"], "gradients")
    four = merged(pipelined["4 accumulation steps"], "gradients")
    assert_equal_gradients(four, once, relative=1e-5)
    assert_equal_gradients(four, single["32 rows"][0]["gradients"], relative=1e-5)


def test_upstream_still_back_propagates_the_sum(pipelined):
    """Fails when upstream divides by itself; then PipelineLoss has to go."""
    n_tokens = 8 * 32
    raw = merged(pipelined["upstream"], "gradients")
    divided = {name: grad / n_tokens for name, grad in raw.items()}
    assert_equal_gradients(divided, merged(pipelined["none"], "gradients"), relative=1e-5)


def test_method_none_has_upstreams_loss(pipelined):
    assert loss_of(pipelined["none"]) == loss_of(pipelined["upstream"])
