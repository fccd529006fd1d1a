"""Validation under a pipeline: it leaves no trace, and its loss is that of one process.

Ranks are real under one schedule and where stages are sharded, and emulated under the others.
"""

import csv
import statistics

import pytest
from launcher import EMULATED, SCHEDULES, arguments, asked_for, merged, run_scenarios

from timelyfreeze.planning.plan import plan_from_json
from timelyfreeze.records.held_out import HELD_OUT as PARTS
from timelyfreeze.records.held_out import HeldOutRow
from timelyfreeze.records.summary import read_summary
from timelyfreeze.records.tables import STEPS as STEPS_FILE
from torchtitan.freezing.report.reports import render_report

REAL = "1F1B"
LONG = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV")
CASES = [pytest.param(s, marks=[pytest.mark.long] if s in LONG else []) for s in SCHEDULES]
SHARDED = [
    pytest.param("ZBVZeroBubble"),
    *(pytest.param(s, marks=[pytest.mark.long]) for s in ("1F1B", "InterleavedZeroBubble")),
]
STEPS = 9
# Step 1 is warm-up, 2-3 upper bound, 4-5 lower bound, 6 ramp, then stable.
PIPELINE = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 1,
    "freezing__method": "timelyfreeze",
    "freezing__last_warmup_step": 1,
    "freezing__last_monitor_step": 5,
    "freezing__last_ramp_step": 6,
    "freezing__discard_batches": 0,
    "training__steps": STEPS,
    "training__local_batch_size": 4,
}
SINGLE = {
    "model__flavor": "short",
    "parallelism__pipeline_parallel_degree": 1,
    "training__steps": 1,
    "training__local_batch_size": 4,
}
HELD_OUT = {"data__validation_fraction": 16 / 1210}  # 16 of the examples of tiny_instruct
VALIDATION = {
    "validation__enable": None,
    "validation__dataset": "alpaca",
    "validation__dataset_path": "tests/assets/tiny_instruct",
}
# Weights that stay as they are, so that every validation has the same answer; examples long enough
# that none is dropped, so that all ways to batch them read the same.
FIXED = {
    **VALIDATION,
    "optimizer__lr": 0.0,
    "training__seq_len": 96,
    "validation__seq_len": 96,
    "validation__freq": 4,
}
# Sequences that two examples share.
WIDE = {**FIXED, "training__seq_len": 256, "validation__seq_len": 256}
PACKED = {**WIDE, "data__packing": None}
# Batches of another shape than those of training.
OTHER_SHAPE = {
    **VALIDATION,
    "training__seq_len": 64,
    "validation__seq_len": 48,
    "validation__local_batch_size": 8,
    "validation__freq": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("validation")


@pytest.fixture(scope="module")
def two_ranks(request, folder):
    real, emulated = [], []
    for (schedule,) in asked_for(request, "schedule"):
        pipeline = {
            **PIPELINE,
            **HELD_OUT,
            **({} if schedule == REAL else EMULATED),
            "parallelism__pipeline_parallel_schedule": schedule,
        }
        changes = {
            "with": OTHER_SHAPE,
            "without": {"training__seq_len": 64},
            "fixed": {**FIXED, "validation__local_batch_size": 8},
            "packed": {**PACKED, "validation__local_batch_size": 8},
        }
        (real if schedule == REAL else emulated).extend(
            {
                "name": f"{schedule} {name}",
                "fake_clock": True,
                "args": arguments(**{**pipeline, **more}),
            }
            for name, more in changes.items()
        )
    replicas = {**SINGLE, **HELD_OUT, **FIXED, "validation__local_batch_size": 4}
    packed = {**replicas, **PACKED}
    real += [
        {"name": name, "args": arguments(**values)}
        for name, values in (("replicas", replicas), ("packed replicas", packed))
    ]
    return run_scenarios(folder, 2, real) | run_scenarios(folder, 1, emulated)


@pytest.fixture(scope="module")
def one_rank(folder):
    """One process without a pipeline."""
    settings = {**SINGLE, **FIXED, "validation__local_batch_size": 4}
    scenarios = [
        {"name": "single", "args": arguments(**settings, **HELD_OUT)},
        {"name": "wide", "args": arguments(**{**settings, **HELD_OUT, **WIDE})},
        {"name": "all examples", "args": arguments(**settings, validation__steps=4)},
    ]
    return run_scenarios(folder / "one", 1, scenarios)


@pytest.fixture(scope="module")
def four_ranks(request, folder):
    """Stages sharded over two replicas."""
    settings = {**PIPELINE, **HELD_OUT, **FIXED, "validation__local_batch_size": 4}
    scenarios = [
        {
            "name": f"{schedule} sharded",
            "fake_clock": True,
            "args": arguments(
                **settings,
                parallelism__data_parallel_shard_degree=2,
                parallelism__pipeline_parallel_schedule=schedule,
            ),
        }
        for (schedule,) in asked_for(request, "sharded")
    ]
    return run_scenarios(folder, 4, scenarios)


def run_folder(folder, name):
    (found,) = (folder / name / "tb").iterdir()
    return found


def examples(folder, name):
    """The examples of losses.csv, empty columns as None."""
    with (run_folder(folder, name) / "losses.csv").open() as file:
        return [
            {key: float(value) if value else None for key, value in example.items()}
            for example in csv.DictReader(file)
        ]


def validation_losses(folder, name):
    found = examples(folder, name)
    return {r["step"]: r["validation_loss"] for r in found if r["validation_loss"] is not None}


@pytest.mark.parametrize("schedule", CASES)
def test_training_goes_on_as_if_there_were_no_validation(two_ranks, schedule):
    with_it, without = two_ranks[f"{schedule} with"], two_ranks[f"{schedule} without"]
    for key in ("losses", "grad_norms", "masks", "applied", "executed", "plan", "n_tokens"):
        assert [seen[key] for seen in with_it] == [seen[key] for seen in without], key
    left, right = merged(with_it, "weights"), merged(without, "weights")
    assert all(bool((left[name] == right[name]).all()) for name in right)
    assert max(with_it[0]["plan"].values()) > 0, "or nothing was frozen"


@pytest.mark.parametrize("schedule", CASES)
def test_its_loss_is_that_of_one_process(two_ranks, one_rank, folder, schedule):
    """Whatever is being frozen: nothing, everything, or what the plan says."""
    (expected,) = validation_losses(folder / "one", "single").values()
    found = validation_losses(folder, f"{schedule} fixed")
    assert list(found) == [1, 4, 8, 9]
    assert all(loss == pytest.approx(expected, rel=1e-6) for loss in found.values())


@pytest.mark.parametrize("schedule", CASES)
def test_packed_examples_have_the_loss_that_they_have_alone(two_ranks, one_rank, folder, schedule):
    (expected,) = validation_losses(folder / "one", "wide").values()
    found = validation_losses(folder, f"{schedule} packed")
    assert list(found) == [1, 4, 8, 9]
    assert all(loss == pytest.approx(expected, rel=1e-5) for loss in found.values())
    (of_replicas,) = validation_losses(folder, "packed replicas").values()
    assert of_replicas == pytest.approx(expected, rel=1e-5)


def held_out_by_hand(folder, name):
    """The mean over targets of each validation's parts, and their number."""
    steps: dict[int, list[HeldOutRow]] = {}
    for row in PARTS.read(run_folder(folder, name)):
        steps.setdefault(row.step, []).append(row)
    means = {
        step: sum(row.targets * row.loss for row in rows) / sum(row.targets for row in rows)
        for step, rows in steps.items()
    }
    return means, [len(rows) for rows in steps.values()]


@pytest.mark.parametrize("schedule", CASES)
def test_each_microbatch_of_a_validation_has_its_loss(two_ranks, folder, schedule):
    """Of two rows each: 16 are held out."""
    means, n_parts = held_out_by_hand(folder, f"{schedule} fixed")
    assert means == pytest.approx(validation_losses(folder, f"{schedule} fixed"), rel=1e-5)
    assert n_parts == [8] * 4


@pytest.mark.parametrize("sharded", SHARDED)
def test_microbatches_of_all_replicas_have_their_losses(four_ranks, folder, sharded):
    """Of one row each."""
    means, n_parts = held_out_by_hand(folder, f"{sharded} sharded")
    assert means == pytest.approx(validation_losses(folder, f"{sharded} sharded"), rel=1e-5)
    assert n_parts == [16] * 4


def test_without_a_pipeline_each_batch_has_its_loss(two_ranks, folder):
    means, n_parts = held_out_by_hand(folder, "replicas")
    assert means == pytest.approx(validation_losses(folder, "replicas"), rel=1e-5)
    assert n_parts == [2]


@pytest.mark.parametrize("sharded", SHARDED)
def test_sharded_stages_have_the_same_loss(four_ranks, one_rank, folder, sharded):
    (expected,) = validation_losses(folder / "one", "single").values()
    found = validation_losses(folder, f"{sharded} sharded")
    assert list(found) == [1, 4, 8, 9]
    assert all(loss == pytest.approx(expected, rel=1e-6) for loss in found.values())


def test_replicas_fraction_the_examples_and_agree_on_the_loss(two_ranks, one_rank, folder):
    """Their batches hold other examples, which matters only if tokens were not weighed equally."""
    (expected,) = validation_losses(folder / "one", "single").values()
    (found,) = validation_losses(folder, "replicas").values()
    assert found == pytest.approx(expected, rel=1e-6)


def test_held_out_examples_are_not_trained_on(one_rank, folder):
    """Training begins otherwise with and without a fraction, and so does the validation."""
    left, right = one_rank["single"][0], one_rank["all examples"][0]
    assert not bool((left["batches"][0] == right["batches"][0]).all())
    assert validation_losses(folder / "one", "single") != validation_losses(
        folder / "one", "all examples"
    )


@pytest.mark.parametrize("schedule", CASES)
def test_losses_are_written_with_the_time_they_took(two_ranks, folder, schedule):
    found = examples(folder, f"{schedule} with")
    (losses,) = [s["losses"] for s in two_ranks[f"{schedule} with"] if s["losses"][0] != -1.0]
    trained = [example for example in found if example["train_loss"] is not None]
    assert [example["step"] for example in trained] == list(range(1, STEPS + 1))
    assert [example["train_loss"] for example in trained] == losses
    seconds = [example["seconds"] for example in found]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    for example, before in zip(found[1:], found, strict=False):
        if example["validation_loss"] is not None:
            assert (example["step"], example["seconds"]) == (before["step"], before["seconds"])
            assert example["train_loss"] is None
    assert list(validation_losses(folder, f"{schedule} with")) == [1, 2, 4, 6, 8, 9]


@pytest.mark.parametrize("schedule", CASES)
def test_the_summary_says_what_happened(two_ranks, folder, schedule):
    name = f"{schedule} with"
    where = run_folder(folder, name)
    summary, ranks = read_summary(where), two_ranks[name]
    assert summary.schedule == schedule
    assert (summary.method, summary.model) == ("timelyfreeze", "llama3 short")
    assert summary.emulated_ranks == (None if schedule == REAL else 2)
    assert summary.n_devices == summary.ranks_per_replica == len(ranks)
    assert (summary.steps, summary.steps_done) == (STEPS, STEPS)
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    assert summary.train_loss == summary.last_loss == losses[-1]
    assert summary.validation_loss == validation_losses(folder, name)[STEPS]
    assert summary.seconds == pytest.approx(examples(folder, name)[-1]["seconds"], abs=1e-3)
    plan = plan_from_json((where / "plan.json").read_text())
    assert summary.batch_ms_predicted == plan.batch_ms
    assert summary.all_frozen_batch_ms == plan.frozen_batch_ms
    last = [entry for seen in ranks for entry in seen["applied"] if entry[0] == STEPS]
    for _, stage, fractions in last:
        assert summary.stage_ratios[stage] == pytest.approx(statistics.fmean(fractions.values()))
    # The curve over steps and the mean are of one kind: by elements.
    steps = [row.freeze_ratio for row in STEPS_FILE.read(where)]
    assert len(set(steps)) > 2
    assert summary.average_freeze_ratio == pytest.approx(statistics.fmean(steps))
    assert summary.tokens_per_second > 0
    assert summary.peak_memory_gib > 0
    *report, note = (where / "report.txt").read_text().splitlines(keepends=True)
    assert "".join(report) == render_report(summary, where)
    assert note.startswith("note  "), "of the configuration"


def test_a_run_without_freezing_has_a_summary_too(one_rank, folder):
    where = run_folder(folder / "one", "single")
    summary = read_summary(where)
    assert (summary.method, summary.schedule, summary.n_devices) == ("none", None, 1)
    assert summary.batch_ms is summary.stage_ratios is summary.failure is None
    assert summary.tokens_per_second is None, "its only step ran cold"
    assert summary.validation_loss is not None
