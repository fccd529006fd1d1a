"""Which runs of a table are averaged, and which are set against which: hand-written runs."""

from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.compare.run_folders import write_run
from tests.timelyfreeze.compare.tables import GAIN, SPEED, TO_LOSS, csv_rows, table
from timelyfreeze.compare.runs.run import read_run
from timelyfreeze.records.tables import MOVES, STEPS, Move, StepRow


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


@pytest.mark.parametrize(("is_emulated", "ends"), [(False, [2, 8, 14]), (True, [1, 6, 11])])
def test_moves_of_an_elastic_run_take_their_time(
    tmp_path: Path, is_emulated: bool, ends: list[int]
) -> None:
    """Two seconds a step, one by the virtual clock; four for each of two moves."""
    folder = write_run(
        tmp_path / "a", "fixed", losses=[(2, 4.0), (4, 3.0), (6, 2.0)], seconds=6.0,
        moves_seconds=8.0, emulated_ranks=4 if is_emulated else None,
    )  # fmt: skip
    steps = [StepRow(n, "stable", 2.0 * n, 2e3, 10.0, virtual_step_ms=1e3) for n in (1, 2, 3)]
    STEPS.write(folder, steps)
    MOVES.write(folder, [Move(step, 5, 2, 2, "5 1", 4.0) for step in (2, 3)])
    run = read_run(folder)
    assert run.by_virtual_clock == is_emulated
    assert run.seconds == ends[-1]
    assert run.step_ends == ends
    assert [seconds for seconds, _ in run.losses] == ends
    assert [seconds for seconds, _ in run.validation_losses] == ends


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


def test_a_run_whose_none_failed_has_no_gain(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none", tokens_per_second=100.0, steps_done=10)
    write_run(tmp_path / "b", "apf", tokens_per_second=120.0)
    assert table(tmp_path)[0][1][GAIN] == "no none run"
