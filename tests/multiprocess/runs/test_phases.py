"""All phases of four ranks: every schedule, a schedule from a file, validation, real rows.

Two schedules are timed on real ranks; the others are emulated.
"""

import re

import pytest
from launcher import EMULATED, FREEZING, ROOT, SCHEDULES, arguments, asked_for, run_scenarios

from tests.timelyfreeze.helpers.pipelines import eager_order
from timelyfreeze.schedule.order import order_to_csv

SHARED = ROOT.parent / "shared"
# One with a full and one with a split backward, each in its own way of many messages.
REAL = ["1F1B", "ZBVZeroBubble"]
# The file's schedule and the others have all that these two have.
LONG = ["GPipe", "Interleaved1F1B"]
CASES = [pytest.param(s, marks=[pytest.mark.long] if s in LONG else []) for s in SCHEDULES]
# A plan is followed however little it promises, which on a busy machine may be nothing.
FREEZING = {**FREEZING, "model__flavor": "tiny", "freezing__min_gain": -0.9}


@pytest.fixture(scope="module")
def four_ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    (folder / "eager.csv").write_text(order_to_csv(eager_order()))
    csv = {
        "parallelism__pipeline_parallel_schedule": "PipelineScheduleSingle",
        "parallelism__pipeline_parallel_schedule_csv": folder / "eager.csv",
        "parallelism__pipeline_parallel_microbatch_size": 1,  # it is of 8 microbatches
    }
    of_schedules = {
        schedule: {"parallelism__pipeline_parallel_schedule": schedule}
        for (schedule,) in asked_for(request, "schedule")
    }
    timed = {
        name: {"name": name, "args": arguments(**FREEZING, **settings, **more)}
        for name, settings in {"csv": csv, **of_schedules}.items()
        for more in [{} if name in REAL else EMULATED]
    }
    scenarios = [one for name, one in timed.items() if name not in REAL]
    emulated = {**FREEZING, **EMULATED}
    scenarios += [
        {
            "name": "per_tensor",
            "fake_clock": True,
            "args": arguments(**emulated, freezing__first_stage="per_tensor"),
        },
    ]
    padded = {
        "training__dataset": "alpaca",
        "training__dataset_path": "tests/assets/tiny_instruct",
        "training__seq_len": 128,
        "training__steps": 2,
        **EMULATED,
    }
    scenarios += [
        {"name": "without padding", "args": arguments(**padded)},
        {"name": "with padding", "args": arguments(**padded, report__count_padding=None)},
    ]
    if SHARED.is_dir():
        instruct = SHARED / "data/instruct"
        for dataset, file in {
            "alpaca": "alpaca_gpt4_1k.jsonl",
            "sharegpt": "openhermes25_subset_sharegpt.jsonl",
        }.items():
            rows = arguments(
                **emulated,
                training__dataset=dataset,
                training__dataset_path=instruct / file,
                training__seq_len=128,
            )
            scenarios.append({"name": dataset, "args": rows})
    seen = run_scenarios(folder, 1, scenarios)
    return seen | run_scenarios(folder, 4, [timed[name] for name in REAL if name in timed])


def test_a_schedule_from_a_csv_file_runs_as_it_is_written(four_ranks):
    (seen,) = four_ranks["csv"]
    assert seen["step"] == 14
    for stage, row in enumerate(eager_order().ranks):
        assert of_stage(seen, stage) == [str(action) for action in row]
    assert max(seen["plan"].values()) > 0


def of_stage(seen, stage):
    return [a for a in seen["executed"] if int(re.match(r"\d+", a).group()) == stage]


@pytest.mark.parametrize("schedule", CASES)
def test_every_schedule_runs_through_all_phases(four_ranks, schedule):
    ranks = four_ranks[schedule]
    assert all(seen["step"] == 14 for seen in ranks)
    (losses,) = [seen["losses"] for seen in ranks if seen["losses"][0] != -1.0]
    assert all(0 < loss < 12 for loss in losses)
    plan = ranks[0]["plan"]
    assert all(seen["plan"] == plan for seen in ranks)
    assert len(plan) == sum(len(seen["executed"]) for seen in ranks)


@pytest.mark.parametrize("schedule", CASES)
def test_what_is_applied_follows_the_plan(four_ranks, schedule):
    """The frozen fraction misses the planned ratio by less than a tensor of each size of the stage.

    In the stable phase. A first stage is frozen whole or not at all.
    """
    for seen in four_ranks[schedule]:
        tensor_fraction = {
            stage: sum(set(sizes)) / sum(sizes) for stage, sizes in seen["sizes"].items()
        }
        for step, stage, fractions in seen["applied"]:
            if step <= 10:
                continue
            for microbatch, fraction in fractions.items():
                backward = "B" if f"{stage}B{microbatch}" in seen["plan"] else "W"
                ratio = seen["plan"][f"{stage}{backward}{microbatch}"]
                if stage == 0 and 0 < ratio < 1:
                    assert fraction in (0.0, 1.0)
                elif ratio in (0.0, 1.0):
                    assert fraction == ratio
                else:
                    assert abs(fraction - ratio) <= tensor_fraction[stage]


@pytest.mark.parametrize("schedule", REAL)
def test_plan_is_made_for_the_order_that_ran(four_ranks, schedule):
    actions = iter(four_ranks[schedule][0]["plan"])
    for seen in four_ranks[schedule]:
        assert [next(actions) for _ in seen["executed"]] == seen["executed"]


def test_first_stage_is_frozen_by_tensors_only_if_its_chain_is_kept(four_ranks):
    """In the ramp every planned ratio is a fraction."""

    def ramp_fractions(name):
        return [
            fraction
            for step, stage, by_microbatch in four_ranks[name][0]["applied"]
            for fraction in by_microbatch.values()
            if stage == 0 and step == 9
        ]

    assert any(0.0 < fraction < 1.0 for fraction in ramp_fractions("per_tensor"))
    assert set(ramp_fractions("csv")) <= {0.0, 1.0}


def test_padding_is_counted_only_if_so_wanted(four_ranks):
    n_positions = 2 * 8 * 128
    assert {seen["n_tokens"] for seen in four_ranks["with padding"]} == {n_positions}
    assert all(0 < seen["n_tokens"] < n_positions for seen in four_ranks["without padding"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="no real rows beside the checkout (../shared)")
@pytest.mark.parametrize("dataset", ["alpaca", "sharegpt"])
def test_real_rows_train_through_all_phases(four_ranks, dataset):
    (losses,) = [s["losses"] for s in four_ranks[dataset] if s["losses"][0] != -1.0]
    assert losses[-1] < losses[0]
    n_positions = 14 * 8 * 128
    assert all(0 < seen["n_tokens"] < n_positions for seen in four_ranks[dataset])
