"""Tables of hand-written runs, worked out by hand."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import WHAT, write_record, write_run, write_scores
from tests.timelyfreeze.compare.tables import GAIN, SPEED, TO_LOSS, csv_rows, rendered, table
from timelyfreeze.compare.groups import compare
from timelyfreeze.compare.metrics import COLUMN_OF, Criteria
from timelyfreeze.compare.runs.run import find_runs
from timelyfreeze.records.scores import BENCHMARKS
from timelyfreeze.records.summary import RunSummary


def test_gains_are_paired_by_seed_and_shown_with_their_spread(tmp_path: Path) -> None:
    speeds = {42: (400.0, 520.0), 22: (500.0, 660.0), 11: (200.0, 250.0)}
    for seed, (none, frozen) in speeds.items():
        write_run(tmp_path / f"a{seed}", "none", seed=seed, tokens_per_second=none)
        write_run(tmp_path / f"b{seed}", "timelyfreeze", seed=seed, tokens_per_second=frozen)
    (none_row, row), notes = table(tmp_path)
    # +30, +32 and +25; the ratio of the mean speeds would be +30.
    assert row[GAIN] == "+29.0 (25.0..32.0)"
    assert row[SPEED] == "477 (250..660)"
    assert row["runs"] == "3"
    assert none_row[GAIN] == "+0.0"
    assert notes == []


def test_throughput_counts_what_the_models_read(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=7.0, unit="images", model="vit tiny")
    (row,), _ = table(tmp_path)
    assert (row["images/s per device"], SPEED in row, "top-1, %" in row) == ("7", False, False)
    write_run(tmp_path / "b", "none", tokens_per_second=250.0)
    rows, _ = table(tmp_path)
    assert {row["images/s or tokens/s per device"] for row in rows} == {"7", "250"}


def test_top1_is_that_of_the_last_validation(tmp_path: Path) -> None:
    for seed, share in ((1, 0.5), (2, 0.625)):
        write_run(tmp_path / str(seed), "none", seed=seed, unit="images", validation_top1=share)
    (row,), _ = table(tmp_path)
    assert row["top-1, %"] == "56.25 (50.00..62.50)"
    assert [row["top1_percent"] for row in csv_rows(tmp_path)] == ["50.0", "62.5"]


def test_the_time_saved_is_a_part_of_that_of_none(tmp_path: Path) -> None:
    for method, seconds in {"none": 40.0, "apf": 30.0, "lisa": 50.0}.items():
        write_run(tmp_path / method, method, seconds=seconds)
    saved = {row["method"]: float(row["time_saved_percent"]) for row in csv_rows(tmp_path)}
    assert saved == pytest.approx({"none": 0.0, "apf": 25.0, "lisa": -25.0})


def test_prediction_and_measurement(tmp_path: Path) -> None:
    write_run(
        tmp_path / "a", "timelyfreeze", batch_ms_predicted=200.0, batch_ms=210.0,
        average_freeze_ratio=0.58749, train_loss=2.5, validation_loss=2.25, seconds=1234.56,
        peak_memory_gib=1.5, score_ms_per_step=0.25, score_memory_mib=12.0,
    )  # fmt: skip
    write_run(
        tmp_path / "b", "timelyfreeze", seed=22, batch_ms_predicted=200.0, batch_ms=190.0,
        average_freeze_ratio=0.58749, train_loss=3.5, validation_loss=None, seconds=1234.56,
        peak_memory_gib=2.5, score_ms_per_step=0.25, score_memory_mib=None,
    )  # fmt: skip
    (row,), _ = table(tmp_path)
    assert row["batch predicted, ms"] == "200.0"
    assert row["measured, ms"] == "200.0 (190.0..210.0)"
    assert row["error, %"] == "+0.0 (-5.0..5.0)"
    assert row["mean freeze ratio"] == "0.587"
    assert row["train loss"] == "3.000 (2.500..3.500)"
    assert row["validation loss"] == "2.250"
    assert row["seconds"] == "1,234.6"
    assert row["peak memory, GiB"] == "2.00 (1.50..2.50)"
    assert (row["scores, ms a step"], row["scores, MiB"]) == ("0.25", "12.0")
    assert row[SPEED] == "-"


def test_the_time_to_loss_is_that_of_the_running_mean(tmp_path: Path) -> None:
    # Running means 3.5 and 2.5: to be reached is 2.5.
    write_run(tmp_path / "a", "none", losses=[(10, 4.0), (20, 3.0), (30, 2.0)])
    # Means 2.75, 2.25 and 4.0: one low loss at 16 s is not enough, and once is enough.
    losses = [(8, 4.0), (16, 1.5), (24, 3.0), (32, 5.0)]
    write_run(tmp_path / "b", "apf", losses=losses)
    # Equal is reached.
    write_run(tmp_path / "c", "fixed", losses=[(7, 2.0), (14, 3.0)])
    write_run(tmp_path / "d", "linear", losses=[(9, 4.0), (99, 2.0), (199, 3.5)])
    write_run(tmp_path / "e", "lisa", losses=[(9, 0.1)])
    rows, _ = table(tmp_path)
    assert {row["method"]: row[TO_LOSS] for row in rows} == {
        "none": "30.0", "apf": "24.0", "fixed": "14.0", "linear": "never", "lisa": "-",
    }  # fmt: skip
    assert [row["seconds_to_none_loss"] for row in csv_rows(tmp_path)] == [
        "30.0", "24.0", "14.0", "never", "",
    ]  # fmt: skip


def test_the_window_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    assert "running mean over 7 logged training losses" in rendered(tmp_path, window=7)


def test_seeds_that_never_get_there_are_counted(tmp_path: Path) -> None:
    for seed, losses in {1: [(5, 2.0), (6, 2.0)], 2: [(5, 9.0), (6, 9.0)]}.items():
        write_run(tmp_path / f"a{seed}", "none", seed=seed, losses=[(9, 3.0), (10, 3.0)])
        write_run(tmp_path / f"b{seed}", "apf", seed=seed, losses=losses)
    rows, _ = table(tmp_path)
    assert rows[1][TO_LOSS] == "6.0, never in 1 of 2"


def test_a_baseline_that_diverged_sets_no_target(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", losses=[(1, 2.0), (2, math.nan)])
    write_run(tmp_path / "b", "apf", losses=[(1, 2.0), (2, 2.0)])
    assert table(tmp_path)[0][1][TO_LOSS] == "-"


def test_failed_and_unfinished_runs_are_told_and_count_for_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0)
    write_run(tmp_path / "b/tb/x", "apf", tokens_per_second=120.0, seed=1)
    write_record(tmp_path / "b", 0, seed=1)
    write_record(tmp_path / "c", 1, seed=2)
    write_run(tmp_path / "d/tb/x", "apf", tokens_per_second=999.0, seed=3, steps_done=59)
    write_record(tmp_path / "d", -9, seed=3)
    write_run(tmp_path / "e", "apf", tokens_per_second=999.0, seed=4, steps_done=0)
    write_record(tmp_path / "f", None, method="fixed", seed=5)
    write_record(tmp_path / "g", 1, method="fixed", seed=6)
    write_run(tmp_path / "set_aside/h", "apf", tokens_per_second=999.0, seed=1)
    rows, notes = table(tmp_path)
    assert [(row["method"], row["runs"], row[SPEED]) for row in rows] == [
        ("none", "1", "100"),
        ("apf", "1, 2 failed, 1 unfinished", "120"),
        ("fixed", "1 failed, 1 unfinished", "-"),
    ]
    assert rows[2][GAIN] == "-"
    assert notes[1:] == [
        f"failed: 1F1B apf seed 2, in {tmp_path / 'c'}",
        f"failed: 1F1B apf seed 3, in {tmp_path / 'd/tb/x'}",
        f"unfinished: 1F1B apf seed 4, in {tmp_path / 'e'}",
        f"unfinished: 1F1B fixed seed 5, in {tmp_path / 'f'}",
        f"failed: 1F1B fixed seed 6, in {tmp_path / 'g'}",
    ]


def test_a_run_that_did_not_end_counts_in_the_row_of_its_own_place(tmp_path: Path) -> None:
    for device in ("some CPU", "some GPU"):
        write_run(tmp_path / device, "apf", device=device)
    write_run(tmp_path / "cut", "apf", device="some GPU", seed=2, steps_done=3)
    rows, _ = table(tmp_path)
    assert {row["on"].split(",")[0]: row["runs"] for row in rows} == {
        "2 x some CPU": "1", "2 x some GPU": "1, 1 unfinished",
    }  # fmt: skip
    # One whose place is not known, or where no run has ended, counts in the row of none.
    write_record(tmp_path / "killed", 1, seed=3)
    write_run(tmp_path / "other", "apf", device="another GPU", seed=4, steps_done=3)
    rows, _ = table(tmp_path)
    assert {row["on"].split(",")[0]: row["runs"] for row in rows} == {
        "2 x some CPU": "1", "2 x some GPU": "1, 1 unfinished", "-": "1 failed, 1 unfinished",
    }  # fmt: skip


def test_why_there_is_no_plan_stands_below(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "timelyfreeze", failure="the solver gave up", tokens_per_second=1.0)
    assert "1F1B timelyfreeze seed 42: the solver gave up" in table(tmp_path)[1]


def test_rows_are_in_the_order_of_the_paper(tmp_path: Path) -> None:
    methods = ["timelyfreeze+apf", "none", "timelyfreeze", "autofreeze", "apf"]
    for schedule in ["own.csv", "ZBVZeroBubble", "1F1B", "GPipe", None, "Interleaved1F1B"]:
        for method in methods:
            write_run(tmp_path / f"{schedule}/{method}", method, schedule=schedule)
    rows, _ = table(tmp_path)
    assert [row["method"] for row in rows[:5]] == [
        "none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf",
    ]  # fmt: skip
    assert [row["schedule"] for row in rows[::5]] == [
        "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "-", "own.csv",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", '{"method": "ap', "summary.json is not JSON"),
        ("summary.json", "[1]", "summary.json is list; it must be an object"),
        ("summary.json", '{"steps": 3}', "summary.json: the whole lacks method, model"),
        (
            "summary.json",
            '{"method": "apf", "train_loss": "low"}',
            "train_loss is 'low'; it must be a number or null",
        ),
        (
            "summary.json",
            '{"method": "apf", "steps": true}',
            "steps is True; it must be a whole number",
        ),
        ("summary.json", json.dumps({**WHAT, "method": "apf", "started_at": "noon"}), "noon"),
        ("settings.json", "[]", "settings.json is list; it must be an object"),
        ("scores.json", "[]", "scores.json: scores is []; it must be an object"),
        (
            "steps.csv",
            "step,freeze_ratio\n1,half\n",
            "steps.csv has the columns step, freeze_ratio; not step, phase",
        ),
        ("losses.csv", "step,train_loss\n1,2.0\n", "losses.csv has the columns step, train_"),
        (
            "losses.csv",
            "step,seconds,train_loss\n1,2.0,low\n",
            "losses.csv has the columns step, seconds, train_loss; not ",
        ),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0)
    broken = write_run(tmp_path / "b", "apf")
    (broken / name).write_text(text)
    rows, notes = table(tmp_path)
    assert [row["method"] for row in rows] == ["none"]
    (note,) = notes
    assert note.startswith(f"not read: {broken}: ")
    assert message in note


def test_a_run_below_two_folders_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a/b", "none", tokens_per_second=100.0)
    rows, _ = table(tmp_path, tmp_path / "a")
    assert rows[0]["runs"] == "1"


def test_the_csv_has_a_row_of_plain_values_for_each_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=4000.0, data_seed=7)
    write_run(
        tmp_path / "b", "timelyfreeze", tokens_per_second=5000.0, batch_ms_predicted=80.0,
        batch_ms=100.0, stage_ratios={"0": 0.5, "1": 0.75}, all_frozen_batch_ms=60.5,
    )  # fmt: skip
    write_record(tmp_path / "c", 1)
    none, frozen, failed = sorted(csv_rows(tmp_path), key=lambda row: row["folder"])
    assert (none["tokens_per_second"], none["data_seed"], none["batch_ms"]) == ("4000.0", "7", "")
    assert (frozen["gain_percent"], frozen["batch_error_percent"]) == ("25.0", "25.0")
    assert (frozen["all_frozen_batch_ms"], frozen["device"]) == ("60.5", "some CPU, 2 cores")
    assert frozen["stage_ratios"] == '{"0": 0.5, "1": 0.75}'
    assert (failed["method"], failed["status"], failed["tokens_per_second"]) == (
        "apf",
        "failed",
        "",
    )
    assert failed["folder"] == str(tmp_path / "c")


def test_accuracies_are_averaged_and_set_against_none(tmp_path: Path) -> None:
    for seed, none, frozen in [(42, 0.5, 0.53), (22, 0.4, 0.38)]:
        write_scores(write_run(tmp_path / f"a{seed}", "none", seed=seed), none)
        write_scores(write_run(tmp_path / f"b{seed}", "apf", seed=seed), frozen)
    (none_row, row), notes = table(tmp_path)
    assert none_row["average accuracy, %"] == "45.00 (40.00..50.00)"
    assert none_row["points over none"] == "+0.00"
    assert row["MMLU, %"] == "45.50 (38.00..53.00)"
    assert row["average accuracy, %"] == "45.50 (38.00..53.00)"
    assert row["points over none"] == "+0.50 (-2.00..3.00)"
    # No run has this one.
    assert "TruthfulQA mc2, %" not in row
    assert notes == []
    assert csv_rows(tmp_path)[0]["accuracy"] == "40.0"


def test_the_time_to_the_accuracy_of_none_is_the_whole_time_of_a_run_that_has_it(
    tmp_path: Path,
) -> None:
    # Seconds and accuracy of none, apf and fixed, for two seeds.
    for seed, runs in {
        1: [(100.0, 0.5), (80.0, 0.5), (60.0, 0.49)],
        2: [(200.0, 0.4), (120.0, 0.41), (100.0, 0.5)],
    }.items():
        for method, (seconds, accuracy) in zip(("none", "apf", "fixed"), runs, strict=True):
            folder = tmp_path / f"{method}{seed}"
            write_scores(write_run(folder, method, seed=seed, seconds=seconds), accuracy)
    # On other questions, and not scored.
    other = write_run(tmp_path / "linear", "linear", seed=1, seconds=50.0)
    write_scores(other, 0.9, n_questions=20)
    write_run(tmp_path / "lisa", "lisa", seed=1, seconds=50.0)
    rows, _ = table(tmp_path)
    assert {row["method"]: row["time to none's accuracy over none's"] for row in rows} == {
        "none": "1.000", "apf": "0.700 (0.600..0.800)", "fixed": "0.500, never in 1 of 2",
        "linear": "-", "lisa": "-",
    }  # fmt: skip


def test_every_benchmark_has_a_column_with_its_title() -> None:
    titles = {f"accuracy_{one.key}": f"{one.title}, %" for one in BENCHMARKS}
    assert {key: COLUMN_OF[key].title for key in titles} == titles


def test_without_scores_there_are_no_columns_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    rows, notes = table(tmp_path)
    assert not [title for title in rows[0] if "accuracy" in title or "points" in title]
    assert notes == []


def test_accuracies_on_other_questions_are_not_set_against_each_other(tmp_path: Path) -> None:
    write_scores(write_run(tmp_path / "a", "none"), 0.5)
    write_scores(write_run(tmp_path / "b", "apf"), 0.6, n_questions=20)
    write_run(tmp_path / "c", "fixed")
    rows, notes = table(tmp_path)
    assert [row["points over none"] for row in rows] == ["+0.00", "-", "-"]
    assert notes[0].startswith("questions differ, so accuracies cannot be compared: 1F1B none ")
    assert "MMLU test 20" in notes[0]
    assert notes[1] == "not evaluated: 1F1B fixed seed 42"


def test_every_key_of_a_summary_is_in_the_csv(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    assert {field.name for field in fields(RunSummary)} <= csv_rows(tmp_path)[0].keys()


def test_a_partition_stands_for_the_cut_that_follows_from_it(tmp_path: Path) -> None:
    """Not the list of all modules; a run without one is told as such."""
    cut = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    for name, parallelism in {
        "a": {"partition": "", "module_fqns_per_model_part": None},
        "b": {"partition": "parameters", "module_fqns_per_model_part": cut},
    }.items():
        write_run(tmp_path / name, "none", settings={"parallelism": parallelism})
    variants = {run.apart for run in compare(find_runs([tmp_path]).runs, Criteria())}
    assert variants == {"partition parameters", "partition unset"}
