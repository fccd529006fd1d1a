"""Predictions against measurements: which runs are made, and what the table says of them."""

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prediction_error import Pipeline, main, parse_pipeline
from prediction_table import collect, excess, render_csv, render_table

from tests.timelyfreeze.compare.run_folders import keys_of, table_notes, write_run
from timelyfreeze.compare.runs.run import find_runs

# 110 and 88 ms were predicted, 121 and 88 measured; 10 ms of each step are no batch.
REAL = {
    "batch_ms_unfrozen_predicted": 110.0,
    "batch_ms_unfrozen": 121.0,
    "batch_ms_predicted": 88.0,
    "batch_ms": 88.0,
    "outside_ms": 10.0,
    "step_ms_predicted": 98.0,
    "step_ms_unfrozen": 120.0,
    "step_ms": 100.0,
}


def write(
    folder: Path, *, ranks: int = 2, cap: Any = 0.8, schedule: str = "1F1B", **summary: Any
) -> Path:
    write_run(folder, "timelyfreeze", schedule=schedule, **{**REAL, **summary})
    settings = {
        "freezing": {"max_freeze_ratio": cap},
        "parallelism": {"pipeline_parallel_degree": ranks},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


class Trainer:
    """Stands in for torchrun: writes what a run writes."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.variables: list[Mapping[str, str]] = []
        self.fails_at: int | None = None

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        self.commands.append(command)
        self.variables.append(variables)
        log.write_text("why it failed\n")
        if len(self.commands) == self.fails_at:
            return 1
        keys = keys_of(command)
        write(
            Path(keys["job.dump_folder"]) / "tb" / "some_name",
            ranks=int(keys["parallelism.pipeline_parallel_degree"]),
            cap=float(keys["freezing.max_freeze_ratio"]),
            schedule=keys["parallelism.pipeline_parallel_schedule"],
            emulated_ranks=4 if "--emulation.enable" in command else None,
        )
        return 0


def tables(text: str) -> list[list[dict[str, str]]]:
    """The markdown tables of ``text``; titles that repeat get the one before them in front."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if not cells:
            continue
        titles, what = [], ""
        for title in cells[0]:
            if title in ("measured", "error"):
                title = f"{what} {title}"
            elif title.endswith("predicted"):
                what = title.removesuffix("predicted").strip(": ")
            titles.append(title)
        found.append([dict(zip(titles, row, strict=True)) for row in cells[2:]])
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("[training]\nsteps = 60\n")
    return path


def run(trainer: Trainer, config: Path, output: Path, *more: str) -> int:
    return main(["run", str(config), str(output), *more], starter=trainer)


# --- which runs are made --------------------------------------------------------------------------


def test_pipelines_are_read_and_refused() -> None:
    assert parse_pipeline("emulated:4") == Pipeline("emulated", 4)
    assert parse_pipeline("real:2") == Pipeline("real", 2)
    for text in ("real", "real:", "real:1", "real:x", "both:2", "emulated:-2"):
        with pytest.raises(argparse.ArgumentTypeError, match="with 2 ranks or more"):
            parse_pipeline(text)


def test_an_emulated_pipeline_is_one_process_and_follows_the_real_one(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    trainer = Trainer()
    more = ["--pipelines", "real:2", "emulated:4", "--schedules", "1F1B", "--r-max", "0.3", "0.8"]
    assert run(trainer, config, tmp_path / "out", *more, "--", "--training.seq_len=64") == 0
    seen = [
        (
            next(word for word in command if word.startswith("--nproc")),
            "--emulation.enable" in command,
            keys_of(command)["parallelism.pipeline_parallel_degree"],
            keys_of(command)["freezing.max_freeze_ratio"],
        )
        for command in trainer.commands
    ]
    assert seen == [
        ("--nproc_per_node=2", False, "2", "0.3"),
        ("--nproc_per_node=1", True, "4", "0.3"),
        ("--nproc_per_node=2", False, "2", "0.8"),
        ("--nproc_per_node=1", True, "4", "0.8"),
    ]
    assert {command[-1] for command in trainer.commands} == {"--training.seq_len=64"}
    assert {variables["OMP_NUM_THREADS"] for variables in trainer.variables} == {"1"}
    assert len({keys_of(c)["job.dump_folder"] for c in trainer.commands}) == 4


def test_what_has_finished_is_not_run_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--pipelines", "real:2", "--schedules", "GPipe", "--r-max", "0.3", "0.5", "0.8"]
    first = Trainer()
    first.fails_at = 2
    assert run(first, config, tmp_path / "out", *more) == 1
    assert "why it failed" in capsys.readouterr().out
    again = Trainer()
    assert run(again, config, tmp_path / "out", *more) == 0
    assert [keys_of(c)["freezing.max_freeze_ratio"] for c in again.commands] == ["0.5"]
    text = (tmp_path / "out" / "prediction.md").read_text()
    assert [row["r_max"] for row in tables(text)[0]] == ["0.3", "0.5", "0.8"]
    assert "failed" not in text
    # Runs of other settings are no part of this table.
    config.write_text("[training]\nsteps = 61\n")
    third = Trainer()
    assert run(third, config, tmp_path / "out", *more) == 2
    assert third.commands == []
    assert "config_sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--r-max", "1.5"],
            "--r-max: '1.5' is given; it must be a number, 0 or more and",
        ),
        (["--repeats", "0"], "--repeats: '0' is given; it must be a whole number, 1 or more"),
        (["--schedules", "GPipe", "GPipe"], "asked for twice"),
        (["--pipelines", "emulated"], "--pipelines: 'emulated' is given"),
        (["--", "--freezing.max-freeze-ratio=0.5"], "--freezing.max_freeze_ratio is among"),
        (["--", "--emulation.enable"], "--emulation.enable is among"),
    ],
)
def test_errors_are_told_before_anything_runs(
    more: list[str], says: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    try:
        status = run(trainer, config, tmp_path / "out", *more)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert trainer.commands == []
    assert says in capsys.readouterr().err


# --- what the table says --------------------------------------------------------------------------


def rows_of(folder: Path) -> tuple[list[list[dict[str, str]]], str]:
    metrics, problems = collect(find_runs([folder]))
    text = render_table(metrics, problems, "# Head")
    return tables(text), text


def test_errors_are_measured_over_predicted() -> None:
    assert excess(121.0, 110.0) == pytest.approx(0.1)
    assert excess(97.0, 100.0) == pytest.approx(-0.03)
    assert excess(97.0, None) is excess(None, 100.0) is excess(1.0, 0.0) is None


def test_a_row_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "one")
    ((row,), errors), _ = rows_of(tmp_path)
    assert row == {
        "pipeline": "real, 2 ranks",
        "schedule": "1F1B",
        "r_max": "0.8",
        "runs": "1",
        "batch without freezing, ms: predicted": "110.0",
        "batch without freezing, ms measured": "121.0",
        "batch without freezing, ms error": "+10.0%",
        "batch with, ms: predicted": "88.0",
        "batch with, ms measured": "88.0",
        "batch with, ms error": "+0.0%",
        "step without freezing, ms: predicted": "120.0",
        "step without freezing, ms measured": "120.0",
        "step without freezing, ms error": "+0.0%",
        "step with, ms: predicted": "98.0",
        "step with, ms measured": "100.0",
        "step with, ms error": "+2.0%",
        "gain predicted": "+22.4%",
        "gain measured": "+20.0%",
        "batch with in its interval": "-",
    }
    assert [(e["what"], e["median"], e["worst"], e["within 3%"]) for e in errors] == [
        ("batch without freezing", "10.0%", "+10.0%", "0 of 1"),
        ("batch with", "0.0%", "+0.0%", "1 of 1"),
        ("step without freezing", "0.0%", "+0.0%", "1 of 1"),
        ("step with", "2.0%", "+2.0%", "1 of 1"),
    ]


def test_steps_have_all_their_batches(tmp_path: Path) -> None:
    write(tmp_path / "one", batches_per_step=3)
    ((row,), _), _ = rows_of(tmp_path)
    assert row["step without freezing, ms: predicted"] == "340.0"


def test_an_emulation_is_measured_by_its_virtual_clock(tmp_path: Path) -> None:
    virtual = {"virtual_step_ms_unfrozen": 60.0, "virtual_step_ms": 49.0}
    write(tmp_path / "one", emulated_ranks=4, ranks=4, **virtual)
    ((row,), _), _ = rows_of(tmp_path)
    assert row["pipeline"] == "emulated, 4 ranks"
    assert row["step without freezing, ms measured"] == "60.0"
    assert row["step with, ms error"] == "-50.0%"


def test_repeats_fraction_a_row_and_the_worst_of_them_is_named(tmp_path: Path) -> None:
    for i, batch_ms in enumerate((88.0, 89.0, 83.6)):
        write(tmp_path / f"a{i}", batch_ms=batch_ms)
    write(tmp_path / "b", schedule="GPipe", cap=0.3, batch_ms=90.6)
    (rows, errors), _ = rows_of(tmp_path)
    # In the paper's order, so GPipe first.
    assert [(row["schedule"], row["runs"]) for row in rows] == [("GPipe", "1"), ("1F1B", "3")]
    assert rows[1]["batch with, ms measured"] == "88.0 (83.6..89.0)"
    assert rows[1]["batch with, ms error"] == "+0.0% (-5.0%..+1.1%)"
    (batch,) = [row for row in errors if row["what"] == "batch with"]
    # 0, 1.1, 2.95 and 5.0% without their signs.
    assert (batch["runs"], batch["median"], batch["worst"]) == ("4", "2.0%", "-5.0%")
    assert batch["worst in"] == "1F1B, r_max 0.8"
    assert batch["within 3%"] == "3 of 4"


def test_batches_in_their_stated_interval_are_counted(tmp_path: Path) -> None:
    # 100 / 1.1 = 90.9 ms; the last run states none.
    for i, (batch_ms, factor) in enumerate(((91.0, 1.1), (90.0, 1.1), (111.0, 1.1), (109.0, None))):
        timed = {"batch_ms_predicted": 100.0, "batch_ms": batch_ms, "interval_factor": factor}
        write(tmp_path / f"a{i}", **timed)
    write(tmp_path / "b", cap=0.3, interval_factor=1.01)
    (rows, errors), _ = rows_of(tmp_path)
    assert [row["batch with in its interval"] for row in rows] == ["1 of 1", "1 of 3"]
    inside = {row["what"]: row["in the stated interval"] for row in errors}
    assert inside["batch with"] == "2 of 4"
    assert {inside[what] for what in inside if what != "batch with"} == {"-"}


def test_what_is_missing_is_said_and_not_made_up(tmp_path: Path) -> None:
    nothing = {**dict.fromkeys(REAL), "failure": "too few steps"}
    write(tmp_path / "a", **nothing)
    write(tmp_path / "b", steps_done=3)
    (write(tmp_path / "c") / "settings.json").unlink()
    write(tmp_path / "d", cap=[0.5, 0.8])
    ((row,), errors), text = rows_of(tmp_path)
    assert set(row.values()) == {"real, 2 ranks", "1F1B", "0.8", "1", "-"}
    assert errors == []
    notes = table_notes(text)
    assert [note.split(":")[0] for note in notes] == [
        "no plan", "unfinished", "not read", "not read",
    ]  # fmt: skip
    assert "max_freeze_ratio is [0.5, 0.8]" in text


def test_csv_has_every_run_with_all_digits(tmp_path: Path) -> None:
    write(tmp_path / "a", batch_ms=88.123456789)
    write(tmp_path / "b", batch_ms=None)
    metrics, _ = collect(find_runs([tmp_path]))
    first, second = csv.DictReader(io.StringIO(render_csv(metrics)))
    assert float(first["batch_ms_measured"]) == 88.123456789
    assert float(first["batch_error"]) == 88.123456789 / 88.0 - 1.0
    assert (second["batch_ms_measured"], second["batch_error"]) == ("", "")
    assert first["pipeline"] == "real, 2 ranks"


def test_table_reads_what_others_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "runs" / "a")
    assert main(["table", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "some CPU, 2 cores, llama3 8M" in out
    assert "`python benchmarks/prediction_error.py table" in out
    assert (tmp_path / "out" / "prediction.md").read_text() in out
    assert (tmp_path / "out" / "prediction.csv").exists()
    (tmp_path / "empty").mkdir()
    assert main(["table", str(tmp_path / "empty")]) == 2
