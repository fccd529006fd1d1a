"""Packed sequences under a pipeline: gradients are those of one process, on every schedule."""

import pytest
from launcher import SCHEDULES, arguments, merged, run_scenarios

pytestmark = pytest.mark.long  # continuous integration runs it

PACKED = {"data__packing": None, "training__seq_len": 192, "training__local_batch_size": 4}
ONE = {"parallelism__pipeline_parallel_degree": 1}
TWO = {"parallelism__pipeline_parallel_degree": 2}
FREEZING = {
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 1,
    "freezing__last_monitor_step": 5,
    "freezing__last_ramp_step": 6,
    "freezing__discard_batches": 0,
    "training__steps": 8,
}
VALIDATION = {
    "data__validation_fraction": 16 / 1210,
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
    "validation__seq_len": 96,
    "validation__local_batch_size": 8,
    "validation__freq": 4,
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    scenarios = [{"name": "packed", "args": arguments(**ONE, **PACKED)}]
    return run_scenarios(tmp_path_factory.mktemp("single"), 1, scenarios)


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    scenarios = [
        {
            "name": schedule,
            "args": arguments(**TWO, **PACKED, parallelism__pipeline_parallel_schedule=schedule),
        }
        for schedule in SCHEDULES
    ]
    # Microbatches of one sequence take another way through upstream's rotary embeddings.
    scenarios.append(
        {
            "name": "microbatches of two",
            "args": arguments(**TWO, **PACKED, parallelism__pipeline_parallel_microbatch_size=2),
        }
    )
    scenarios += [
        {
            "name": f"freezing {schedule}",
            "fake_clock": True,
            "args": arguments(
                **TWO,
                **PACKED,
                **FREEZING,
                **VALIDATION,
                parallelism__pipeline_parallel_schedule=schedule,
            ),
        }
        for schedule in ("1F1B", "ZBVZeroBubble")
    ]
    return run_scenarios(tmp_path_factory.mktemp("pipelined"), 2, scenarios)


@pytest.mark.parametrize("name", [*SCHEDULES, "microbatches of two"])
def test_gradients_equal_those_of_one_process(single, pipelined, name):
    reference = single["packed"][0]
    ours = merged(pipelined[name], "gradients")
    assert ours.keys() == reference["gradients"].keys()
    for parameter, expected in reference["gradients"].items():
        error = float((ours[parameter] - expected).norm() / expected.norm())
        assert error < 1e-5, f"{parameter}: relative difference {error:.2e}"
    (losses,) = [seen["losses"] for seen in pipelined[name] if seen["losses"][0] != -1.0]
    assert losses == pytest.approx(reference["losses"], rel=1e-6)


def test_several_examples_are_in_a_sequence(single):
    """Each example of ours begins with the begin token."""
    seen = single["packed"][0]
    begins = int((seen["batches"][0] == 0).sum())
    assert begins > 4
    assert seen["n_tokens"] > 0.8 * 4 * 192


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_freezing_and_validation_work_with_packed_sequences(pipelined, schedule):
    ranks = pipelined[f"freezing {schedule}"]
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert max(ranks[0]["plan"].values()) > 0
