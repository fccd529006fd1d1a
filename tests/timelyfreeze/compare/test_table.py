"""Tables of hand-written runs, worked out by hand."""

import csv
import io
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.compare.run_folders import (
    WHAT,
    table_notes,
    table_rows,
    write_record,
    write_run,
    write_scores,
)
from timelyfreeze.compare.groups import compare
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.page import render_markdown
from timelyfreeze.compare.runs import find_runs, read_run
from timelyfreeze.compare.table import render_csv, tabulate
from timelyfreeze.records import RunSummary

GAIN = "gain over none, %"
TO_LOSS = "seconds to none's loss"
SPEED = "tokens/s per device"


def rendered(*folders: Path, window: int = 2, reference: Path | None = None) -> str:
    found = find_runs(folders)
    terms = Terms(window, None if reference is None else read_run(reference))
    return render_markdown(tabulate(compare(found.runs, terms), found.unreadable, terms), terms)


def table(*folders: Path, **terms: Any) -> tuple[list[dict[str, str]], list[str]]:
    text = rendered(*folders, **terms)
    return table_rows(text), table_notes(text)


def csv_rows(folder: Path, window: int = 2) -> list[dict[str, str]]:
    compared = compare(find_runs([folder]).runs, Terms(window))
    return list(csv.DictReader(io.StringIO(render_csv(compared))))


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


def test_a_gain_needs_the_same_schedule(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", schedule="GPipe", tokens_per_second=400.0)
    write_run(tmp_path / "b", "apf", schedule="1F1B", tokens_per_second=500.0, losses=[(1, 1)] * 3)
    rows, notes = table(tmp_path)
    assert [row["schedule"] for row in rows] == ["GPipe", "1F1B"]
    assert rows[1][GAIN] == rows[1][TO_LOSS] == "no none run"
    assert notes == [
        "no none run of the same schedule, seed, device, n_devices, model, emulated_ranks and "
        "work in a step: 1F1B apf seed 42"
    ]
    assert csv_rows(tmp_path)[1]["gain_percent"] == ""


def test_a_seed_without_none_is_left_out_of_the_gain_and_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", seed=42, tokens_per_second=400.0)
    write_run(tmp_path / "b", "apf", seed=42, tokens_per_second=500.0)
    write_run(tmp_path / "c", "apf", seed=22, tokens_per_second=700.0)
    rows, notes = table(tmp_path)
    assert rows[1][GAIN] == "+25.0"
    assert rows[1][SPEED] == "600 (500..700)"
    assert len(notes) == 1
    assert notes[0].endswith(": 1F1B apf seed 22")


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


def test_other_devices_are_neither_averaged_nor_compared(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_run(here / "a", "none", tokens_per_second=100.0)
    write_run(here / "b", "apf", tokens_per_second=120.0)
    write_run(here / "c", "apf", seed=22, tokens_per_second=130.0)
    write_run(there / "b", "apf", tokens_per_second=9000.0, device="some GPU")
    rows, notes = table(here, there)
    assert [(r["method"], r["on"], r[SPEED], r[GAIN]) for r in rows] == [
        ("none", "2 x some CPU, 2 cores, llama3 8M", "100", "+0.0"),
        ("apf", "2 x some CPU, 2 cores, llama3 8M", "125 (120..130)", "+20.0"),
        ("apf", "2 x some GPU, llama3 8M", "9,000", "no none run"),
    ]
    assert notes[0] == (
        "device differs: some GPU in 1F1B apf seed 42; some CPU, 2 cores in all others"
    )
    # Of seed 22 there is no none run at all, of seed 42 none on that device.
    assert notes[1].endswith(": 1F1B apf seed 22, 1F1B apf seed 42")


def test_other_settings_are_neither_averaged_nor_taken_for_repeats(tmp_path: Path) -> None:
    none = {"training": {"local_batch_size": 8}, "freezing": {"max_freeze_ratio": 0.1}}
    write_run(tmp_path / "a", "none", tokens_per_second=100.0, settings=none)
    for i, (cap, seed, speed) in enumerate([(0.5, 42, 120.0), (0.8, 42, 130.0), (0.8, 22, 150.0)]):
        freezing = {"max_freeze_ratio": cap, "seed": seed, "apf": {"threshold": i}}
        settings = {"training": {"local_batch_size": 8}, "freezing": freezing}
        write_run(
            tmp_path / f"b{i}", "timelyfreeze", seed=seed, tokens_per_second=speed,
            settings=settings,
        )  # fmt: skip
    rows, _ = table(tmp_path)
    # Options of another method, and seeds, set no runs apart.
    assert [(row["settings"], row["runs"], row[SPEED]) for row in rows] == [
        ("-", "1", "100"),
        ("max_freeze_ratio 0.5", "1", "120"),
        ("max_freeze_ratio 0.8", "2", "140 (130..150)"),
    ]
    assert [row["settings"] for row in csv_rows(tmp_path)][1:] == [
        "max_freeze_ratio 0.5", "max_freeze_ratio 0.8", "max_freeze_ratio 0.8",
    ]  # fmt: skip


def test_a_gain_needs_as_much_work_in_a_step(tmp_path: Path) -> None:
    def settings(**training: int) -> dict[str, Any]:
        return {"training": {"seq_len": 64, "steps": 60, **training}, "optimizer": {"lr": 0.1}}

    write_run(tmp_path / "a", "none", tokens_per_second=100.0, settings=settings())
    write_run(tmp_path / "b", "apf", tokens_per_second=120.0, settings=settings(steps=90))
    write_run(tmp_path / "c", "fixed", tokens_per_second=900.0, settings=settings(seq_len=32))
    rows, notes = table(tmp_path)
    assert [row[GAIN] for row in rows] == ["+0.0", "+20.0", "no none run"]
    assert notes[0].endswith("and work in a step: 1F1B fixed seed 42")


def test_emulated_pipelines_are_as_fast_as_their_virtual_clock_says(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0)
    for name, method, speed in [("b", "none", 200.0), ("c", "apf", 300.0)]:
        write_run(
            tmp_path / name, method, emulated_ranks=4, n_devices=1, tokens_per_second=10.0,
            virtual_tokens_per_second=speed,
        )  # fmt: skip
    rows, _ = table(tmp_path)
    emulated = "4 emulated ranks on 1 x some CPU, 2 cores, llama3 8M"
    assert [(row["on"], row[SPEED], row[GAIN]) for row in rows] == [
        ("2 x some CPU, 2 cores, llama3 8M", "100", "+0.0"),
        (emulated, "200", "+0.0"),
        (emulated, "300", "+50.0"),
    ]


def test_time_to_the_loss_of_a_reference(tmp_path: Path) -> None:
    # Running means end at 2.5.
    losses = [(10, 4.0), (20, 3.0), (30, 2.0)]
    reference = write_run(tmp_path / "there/a", "none", device="some GPU", losses=losses)
    write_run(tmp_path / "here/b", "apf", losses=[(5, 3.0), (10, 2.5), (15, 2.4)])
    write_run(tmp_path / "here/c", "fixed", losses=[(5, 3.0), (10, 2.5)])
    write_run(tmp_path / "here/d", "lisa", losses=[(5, 1.0), (10, 1.0)], model="llama3 1B")
    rows, notes = table(tmp_path / "here", reference=reference)
    assert [row["seconds to the reference's loss"] for row in rows] == ["15.0", "never", "-"]
    assert notes[1:4] == [
        f"the reference: 1F1B none seed 42, on 2 x some GPU, llama3 8M, in {reference}",
        "of another model than the reference, not held against it: 1F1B lisa seed 42",
        "not on the reference's devices, its loss in their own seconds: "
        "1F1B apf seed 42, 1F1B fixed seed 42",
    ]


def test_smaller_differences_are_compared_and_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0, config_file="x/small.toml")
    write_run(tmp_path / "b", "apf", tokens_per_second=120.0, config_file="y/small.toml")
    write_run(
        tmp_path / "c", "fixed", tokens_per_second=110.0, config_file="x/large.toml",
        torch_version="2.12.0", steps=30, steps_done=30,
    )  # fmt: skip
    rows, notes = table(tmp_path)
    assert [row[GAIN] for row in rows] == ["+0.0", "+20.0", "+10.0"]
    assert "on" not in rows[0]
    assert notes == [
        "torch_version differs: 2.12.0 in 1F1B fixed seed 42; 2.13.0 in all others",
        "config_file differs: large.toml in 1F1B fixed seed 42; small.toml in all others",
        "steps differs: 30 in 1F1B fixed seed 42; 60 in all others",
    ]


def test_of_several_baselines_the_nearest_in_time_counts(tmp_path: Path) -> None:
    for name, hour, speed in [("a", 8, 100.0), ("b", 13, 200.0), ("c", 20, 400.0)]:
        started = f"2026-11-21T{hour:02}:00:00+00:00"
        write_run(tmp_path / name, "none", started_at=started, tokens_per_second=speed)
    # 14:30 in the baselines' zone.
    started = "2026-11-21T23:30:00+09:00"
    write_run(tmp_path / "d", "apf", started_at=started, tokens_per_second=300.0)
    assert table(tmp_path)[0][1][GAIN] == "+50.0"


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


def test_a_run_whose_none_failed_has_no_gain(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0, steps_done=10)
    write_run(tmp_path / "b", "apf", tokens_per_second=120.0)
    assert table(tmp_path)[0][1][GAIN] == "no none run"


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


def test_broken_scores_are_named(tmp_path: Path) -> None:
    (write_run(tmp_path / "a", "none") / "scores.json").write_text("[]")
    rows, notes = table(tmp_path)
    assert rows == []
    assert notes == [f"not read: {tmp_path / 'a'}: scores.json: scores is []; it must be an object"]


def test_every_key_of_a_summary_is_in_the_csv(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    assert {field.name for field in fields(RunSummary)} <= csv_rows(tmp_path)[0].keys()
