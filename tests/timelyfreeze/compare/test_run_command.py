"""What is run, in which order, and what a second call leaves alone; the trainer is a stand-in."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import keys_of, table_rows, write_run
from tests.timelyfreeze.compare.tables import told
from tests.tools.golden import assert_golden, assert_only
from timelyfreeze.compare.command import main
from timelyfreeze.compare.runs import jobs as comparison_jobs
from timelyfreeze.compare.runs.jobs import ROOT, start
from timelyfreeze.records.tables import STEPS, StepRow

FILE = "run_commands.txt"
SPEEDS = {"none": 100.0, "apf": 125.0, "fixed": 150.0}


class Trainer:
    """Stands in for torchrun: writes what a run writes, or fails as a run fails."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.found_in_folder: list[list[str]] = []
        self.fails: set[str] = set()
        self.stops_early: set[str] = set()
        self.is_interrupted_at: str | None = None

    @property
    def labels(self) -> list[str]:
        return [label(keys_of(command)) for command in self.commands]

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        self.commands.append(command)
        keys = keys_of(command)
        folder = Path(keys["job.dump_folder"])
        assert log.parent == folder
        self.found_in_folder.append(sorted(path.name for path in folder.iterdir()))
        name = label(keys)
        log.write_text("first line\n" + 40 * "...\n" + f"{name} says why\n")
        (folder / "checkpoint").mkdir(exist_ok=True)
        if name == self.is_interrupted_at:
            raise KeyboardInterrupt
        if name in self.fails:
            return 3
        method = keys["freezing.method"]
        write_run(
            folder / "tb" / "some_name", method, seed=int(keys["debug.seed"]),
            schedule=keys["parallelism.pipeline_parallel_schedule"],
            tokens_per_second=SPEEDS[method], steps_done=10 if name in self.stops_early else 60,
        )  # fmt: skip
        return 0


def label(keys: Mapping[str, str]) -> str:
    schedule = keys["parallelism.pipeline_parallel_schedule"]
    return f"{schedule} {keys['freezing.method']} seed {keys['debug.seed']}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("[training]\nsteps = 60\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def run(trainer: Trainer, config: Path, output: Path, *more: str, methods: str = "none apf") -> int:
    arguments = ["run", str(config), str(output), "--methods", *methods.split()]
    return main([*arguments, "--schedules=1F1B", "--nproc=2", *more], starter=trainer)


@pytest.mark.parametrize("name", ["GPipe", None])
def test_without_schedules_that_of_the_configuration_is_run(
    config: Path, output: Path, name: str | None
) -> None:
    if name is not None:
        section = f"[parallelism]\npipeline_parallel_schedule = '{name}'\n"
        config.write_text(config.read_text() + section)
    trainer = Trainer()
    arguments = ["run", str(config), str(output), "--methods", "none", "--nproc", "2"]
    assert main(arguments, starter=trainer) == 0
    assert trainer.labels == [f"{name or '1F1B'} none seed 42"]


@pytest.mark.parametrize(
    ("more", "nproc", "degree"),
    [
        ((), 3, None),
        (("--nproc", "2"), 2, "2"),
        (("--", "--emulation.enable"), 1, None),
        (("--nproc", "1", "--", "--emulation.enable"), 1, None),
    ],
)
def test_without_nproc_a_run_is_what_the_configuration_says(
    config: Path, output: Path, more: Sequence[str], nproc: int, degree: str | None
) -> None:
    """Above all an emulated one is one process, and keeps its ranks."""
    config.write_text("[parallelism]\npipeline_parallel_degree = 3\n")
    trainer = Trainer()
    arguments = ["run", str(config), str(output), "--methods", "none", "--schedules", "1F1B"]
    assert main([*arguments, *more], starter=trainer) == 0
    (command,) = trainer.commands
    assert f"--nproc_per_node={nproc}" in command
    assert keys_of(command).get("parallelism.pipeline_parallel_degree") == degree


APF = "1F1B apf seed 42"
# Calls of one output folder, one after the other: what happens to a run, and what is asked for.
CALLS: dict[str, list[tuple[str, str]]] = {
    "finished runs are not run again": [("", "none apf"), ("", "none apf fixed")],
    "an unfinished run starts anew, its files are kept": [
        *2 * [("stops_early", "none apf")], ("", "none apf"),
    ],
    "an interrupted call goes on where it stopped": [
        ("is_interrupted_at", "none apf fixed"), ("", "none apf fixed"),
    ],
    "a failing run is shown and the others go on": [
        ("fails", "none apf fixed"), ("", "none apf fixed"),
    ],
    "runs of other settings are not taken for these": [
        ("", "none"), ("", "none apf --nproc 4"), ("", "none apf -- --training.steps=30"),
        ("another configuration", "none apf"),
    ],
    "a copied configuration is the same one": [("", "none"), ("a copy", "none")],
    "what is compared runs close together": [
        ("", "none apf --schedules GPipe 1F1B --seeds 22 11"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_make_what_is_missing(
    config: Path, output: Path, name: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    trainer = Trainer()
    # Each run takes 30 s.
    monkeypatch.setattr(comparison_jobs.time, "monotonic", lambda: 30.0 * len(trainer.commands))
    said: list[object] = []
    for change, words in CALLS[name]:
        trainer.fails = trainer.stops_early = set()
        trainer.is_interrupted_at = None
        if change in ("fails", "stops_early"):
            setattr(trainer, change, {APF})
        elif change == "is_interrupted_at":
            trainer.is_interrupted_at = APF
        elif change == "a copy":
            config = config.rename(config.with_name("copy.toml"))
        elif change:
            config.write_text("[training]\nsteps = 61\n")
        methods, *more = re.split(r" (?=--)", words)
        before = len(trainer.commands)
        try:
            ended: object = run(trainer, config, output, *" ".join(more).split(), methods=methods)
        except KeyboardInterrupt as error:
            ended = error
        printed = capsys.readouterr()
        lines = re.findall(r"^(?:\[| {4}[^.]).*", printed.out, re.M) + printed.err.splitlines()
        said += [f"> {words}: {ended}", *trainer.labels[before:], *lines]
        found = trainer.found_in_folder[before:]
        said += [f"found {names}" for names in found if names != ["comparison_run.json"]]
    if output.exists():
        kept = (
            path
            for path in output.glob("set_aside/**/*")
            if path.is_file() or not [*path.iterdir()]
        )
        said += sorted(str(path.relative_to(output)) for path in kept)
        table = told(output, titles=("schedule", "method", "runs", "gain over none, %"))
        said.append(table.replace(str(output), "FOLDER"))
    text = "\n".join(map(str, said)).replace(str(output.parent), "PLACE")
    assert_golden(FILE, name, re.sub(r"\b[0-9a-f]{64}\b", "SHA", text))


def test_every_text_that_is_expected_is_made() -> None:
    assert_only(FILE, CALLS)


def test_the_table_is_printed_and_written(
    config: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    assert run(trainer, config, output) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [row["gain over none, %"] for row in rows] == ["+0.0", "+25.0"]
    assert table_rows((output / "comparison.md").read_text()) == rows
    assert (output / "comparison.csv").read_text().count("\n") == 3
    assert keys_of(trainer.commands[0])["job.dump_folder"] == str(output / "1F1B/none/seed_42")


@pytest.mark.parametrize("change", ["", "failed", "other keys", "no times"])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_where_it_can(
    config: Path, output: Path, change: str
) -> None:
    trainer = Trainer()
    trainer.is_interrupted_at = "1F1B apf seed 42"
    with pytest.raises(KeyboardInterrupt):
        run(trainer, config, output)
    folder = output / "1F1B/apf/seed_42"
    (folder / "checkpoint/step-2").mkdir()
    (folder / "checkpoint/step-2/.metadata").touch()
    (folder / "tb/killed").mkdir(parents=True)
    steps = [StepRow(step, "", 1.0 * step, 1e3, 1.0) for step in (1, 2)]
    STEPS.write(folder / "tb/killed", steps[1:] if change == "no times" else steps)
    record = folder / "comparison_run.json"
    told = json.loads(record.read_text())
    told |= {"exit_status": 1} if change == "failed" else {}
    told["settings"] |= {"nproc": 4} if change == "other keys" else {}
    record.write_text(json.dumps(told))
    trainer.is_interrupted_at = None
    assert run(trainer, config, output) == 0
    goes_on = not change
    assert trainer.found_in_folder[-1] == (
        ["checkpoint", "comparison_run.json", "tb", "train.log"]
        if goes_on
        else ["comparison_run.json"]
    )
    assert (output / "set_aside").exists() is not goes_on


def test_all_errors_are_told_before_anything_runs(
    config: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    arguments = ["run", f"{config}x", str(output), "--methods", "none", "apf", "none", "--nproc"]
    arguments += ["0", "--schedules", "1F1B", "--", "--debug.seed", "3", "--job.dump-folder=x"]
    assert main(arguments, starter=trainer) == 2
    error = capsys.readouterr().err
    assert [
        part in error
        for part in (
            f"CONFIG is '{config}x'",
            "--nproc is 0; it must be 1 or more",
            "asked for twice: 1F1B none seed 42",
            "--debug.seed is among the trainer's arguments",
            "--job.dump_folder is among the trainer's arguments",
        )
    ] == 5 * [True]
    assert trainer.commands == []
    assert not output.exists()


def test_table_reads_runs_made_elsewhere_and_leaves_them_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "here/a", "none", tokens_per_second=100.0)
    write_run(tmp_path / "there/b", "apf", tokens_per_second=110.0)
    before = sorted(tmp_path.rglob("*"))
    folders = [str(tmp_path / "here"), str(tmp_path / "there")]
    assert main(["show", "--table", *folders]) == 0
    assert table_rows(capsys.readouterr().out)[1]["gain over none, %"] == "+10.0"
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["show", "--table", *folders, "--output", str(tmp_path / "new/one")]) == 0
    written = sorted(path.name for path in (tmp_path / "new/one").iterdir())
    assert written == ["comparison.csv", "comparison.md"]


def test_output_and_exit_status_of_a_process(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.environ['X']); sys.exit('why')"
    log = tmp_path / "train.log"
    assert start([sys.executable, "-c", program], {"X": "y"}, log) == 1
    assert sorted(log.read_text().splitlines()) == sorted([f"{ROOT} y", "why"])


def test_an_interrupt_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(comparison_jobs.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "train.log")
    assert started[0].returncode == -signal.SIGTERM


def test_time_to_go_is_that_of_the_runs_still_to_make(
    config: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(Trainer(), config, output, methods="fixed")
    capsys.readouterr()
    # Two runs of 30 and 50 s; read at the start and the end of each, and after what follows it.
    clock = iter([0.0, 30.0, 30.0, 100.0, 150.0, 150.0])
    monkeypatch.setattr(comparison_jobs.time, "monotonic", lambda: next(clock))
    run(Trainer(), config, output, methods="none fixed apf")
    assert re.findall(r"^\[.*", capsys.readouterr().out, re.M) == [
        "[1/3] 1F1B none seed 42: ... 00:30, 00:30 to go",
        "[2/3] 1F1B fixed seed 42: finished before",
        "[3/3] 1F1B apf seed 42: ... 00:50, 00:00 to go",
    ]
