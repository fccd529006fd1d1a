"""A run whose batches grow as its front freezes learns what one with the batches of the start does.

In float32: the same rows in the same steps while a step's rows stay; where they grow, the same rows
in the same order, in fewer steps.
"""

import math

import elastic_scenarios
import pytest
import torch
from launcher import merged, run_scenarios

# In the suite test_parts has packing by fewer ranks.
pytestmark = pytest.mark.long

# Checks after steps 4, 6 and 8 freeze 3, 6 and 8 of 10 layers.
FREEZING = {
    "freezing__method": "linear",
    "freezing__last_warmup_step": 2,
    "freezing__linear.check_interval": 2,
    "freezing__linear.layers_per_check": 3,
    "freezing__linear.max_layers": 8,
}
N_ROWS = 8  # of a pipeline batch
RATE = 1e-3


folder = elastic_scenarios.rows_folder


def scenario(folder, name, *, rows, steps, most=None, **more):
    """``most`` is the largest global batch, 0 for that of the start, None without packing."""
    packing = {}
    if most is not None:
        packing = {
            "freezing__packing.mode": "performance",
            "freezing__packing.max_global_batch": most,
        }
    every = {
        "model__flavor": "8M",
        "optimizer__lr": RATE,
        "training__steps": steps,
        "training__local_batch_size": N_ROWS,
        "training__global_batch_size": rows,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 1,
        **FREEZING,
        **packing,
        **more,
    }
    made = elastic_scenarios.scenario(folder, name, is_elastic=False, **every)
    return made | {"is_elastic": most is not None}


CONSTANT = {"lr_scheduler__decay_ratio": 0.0}
SCHEDULE = {
    "freezing__packing.learning_rate": "sqrt",
    "lr_scheduler__decay_type": "linear",
    "lr_scheduler__min_lr_factor": 0.0,
}


@pytest.fixture(scope="module")
def runs(folder):
    scenarios = [
        scenario(folder, "stays", rows=32, steps=10),
        scenario(folder, "packs", rows=32, steps=10, most=0, save_at=[7]),
        scenario(folder, "doubles", rows=8, steps=10, most=16, save_at=[6], **CONSTANT),
    ]
    seen = run_scenarios(folder, 2, scenarios, script="elastic_run.py")
    resumed = [
        scenario(
            folder, "packs again", rows=32, steps=10, most=0, resumes="packs/checkpoint/step-7"
        ),
        # By hand, with twice the rows in two accumulations.
        scenario(
            folder, "doubled", rows=16, steps=8, resumes="doubles/checkpoint/step-6", **CONSTANT
        ),
    ]
    return seen | run_scenarios(folder / "later", 2, resumed, script="elastic_run.py")


@pytest.fixture(scope="module")
def grown(folder):
    """Runs whose steps become larger more than once, and of another schedule."""
    scenarios = [
        scenario(
            folder, "GPipe", rows=32, steps=10, most=0,
            parallelism__pipeline_parallel_schedule="GPipe",
        ),
        scenario(folder, "stays small", rows=8, steps=24),
        scenario(folder, "grows", rows=8, steps=23, most=32, save_at=[9], **SCHEDULE),
    ]  # fmt: skip
    seen = run_scenarios(folder, 2, scenarios, script="elastic_run.py")
    saved = "grows/checkpoint/step-9"
    again = scenario(
        folder, "grows again", rows=8, steps=23, most=32, resumes=saved, **SCHEDULE
    )  # fmt: skip
    return seen | run_scenarios(folder / "later", 2, [again], script="elastic_run.py")


def rows_of_steps(ranks):
    """Return {step: its rows in the order of reading}."""
    found = {}
    for step, rows in ranks[0]["rows"]:
        found.setdefault(step, []).extend(rows)
    return found


def losses_of_steps(ranks):
    found = {}
    for step, loss in ranks[-1]["losses"]:
        found[step] = found.get(step, 0.0) + loss
    return found


def assert_same_weights(have, want):
    for key in ("weights", "moments"):
        torch.testing.assert_close(merged(have, key), merged(want, key), rtol=1e-5, atol=1e-7)


def test_a_step_takes_fewer_and_larger_batches(runs):
    assert runs["packs"][0]["batches"] == [(1, 8, 32), (2, 16, 32), (4, 32, 32)]
    assert runs["packs again"][0]["batches"] == [(1, 8, 32), (2, 16, 32), (4, 32, 32)]
    n_batches = {}
    for step, _ in runs["packs"][0]["rows"]:
        n_batches[step] = n_batches.get(step, 0) + 1
    assert list(n_batches.values()) == [4] * 6 + [2] * 2 + [1] * 2


def test_another_schedule_is_cut_otherwise_and_learns_the_same(runs, grown):
    # With two more layers frozen there is another cut, and no room for more rows.
    assert grown["GPipe"][0]["batches"] == [(1, 8, 32), (2, 16, 32), (2, 16, 32)]
    assert_fewer_accumulations_learn_the_same(runs["stays"], grown["GPipe"])


@pytest.mark.parametrize("name", ["packs", "packs again"])
def test_fewer_accumulations_learn_the_same(runs, name):
    assert_fewer_accumulations_learn_the_same(runs["stays"], runs[name])


def assert_fewer_accumulations_learn_the_same(stays, found):
    rows, losses = rows_of_steps(found), losses_of_steps(found)
    assert max(rows) == 10
    assert rows == {step: rows_of_steps(stays)[step] for step in rows}
    expected = losses_of_steps(stays)
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-6)
    assert_same_weights(found, stays)


def test_once_a_step_is_one_batch_it_takes_more_rows(grown):
    assert grown["grows"][0]["batches"] == [(1, 8, 8), (3, 24, 24), (4, 32, 32)]
    n_rows = [len(rows) for rows in rows_of_steps(grown["grows"]).values()]
    # 23 batches of 8 are 12 of the first 8 steps, and three times 4, of which 1 is beyond them.
    assert n_rows == [8] * 6 + [24] * 2 + [32] * 3
    assert grown["grows"][0]["step"] == 11


def in_order(ranks):
    return [row for rows in rows_of_steps(ranks).values() for row in rows]


def test_rows_come_in_order_whatever_the_size_of_a_step(grown):
    expected = in_order(grown["stays small"])
    assert in_order(grown["grows"]) == expected
    assert in_order(grown["grows again"]) == expected[-2 * 32 :]


def test_the_learning_rate_follows_the_rows(grown):
    """Warm-up of a step, then down to 0 in 22: the schedule of the run without packing."""
    n_read, expected = 0, {}
    for step in range(1, 12):
        growth = 1 if step <= 6 else 3 if step <= 8 else 4
        expected[step] = RATE * (1.0 if n_read < 2 else 1.0 - (n_read - 1) / 22) * math.sqrt(growth)
        n_read += growth
    assert dict(grown["grows"][0]["rates"]) == pytest.approx(expected)
    assert dict(grown["grows again"][0]["rates"]) == pytest.approx(
        {step: expected[step] for step in (10, 11)}
    )


def test_a_resumed_run_ends_where_the_other_did(grown):
    assert grown["grows again"][0]["step"] == 11
    assert_same_weights(grown["grows again"], grown["grows"])


def test_a_larger_step_is_one_of_a_run_that_accumulates_as_many_rows(runs):
    assert runs["doubles"][0]["step"] == runs["doubled"][0]["step"] == 8
    # Six steps of 8 rows and two of 16: those of ten batches, in their order.
    assert in_order(runs["doubles"]) == in_order(runs["stays"])[:80]
    have, want = losses_of_steps(runs["doubles"]), losses_of_steps(runs["doubled"])
    assert {step: have[step] for step in want} == pytest.approx(want, rel=1e-6)
    assert_same_weights(runs["doubles"], runs["doubled"])
