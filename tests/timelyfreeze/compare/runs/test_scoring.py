"""Runs that are scored as they finish, and the model before training; processes are stand-ins."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.timelyfreeze.compare.run_folders import (
    keys_of,
    table_notes,
    table_rows,
    write_run,
    write_scores,
)
from tests.timelyfreeze.compare.tables import rendered, table
from timelyfreeze.compare.command import main
from timelyfreeze.compare.runs import scoring
from timelyfreeze.compare.runs.scoring import parse_questions
from timelyfreeze.compare.table import Table, render_html
from timelyfreeze.records.scores import read_scores
from timelyfreeze.records.tables import STEPS

CONFIG = "[training]\nsteps = 60\n[checkpoint]\nenable = true\n"
AVERAGE, TO_ACCURACY = "average accuracy, %", "time to none's accuracy over none's"


class Machine:
    """Stands in for torchrun and for ``evaluate``.

    A run takes a second a step, of ``apf`` 0.5 s. Scores are 40% for none, 45% else, 30% before.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.evaluated: list[Sequence[str]] = []
        self.fails: set[str] = set()
        self.asks_too_little = False
        self.begins_with: str | None = "models/small"

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        is_evaluation = list(command[1:4]) == ["-m", "timelyfreeze", "evaluate"]
        return self._evaluate(command, log) if is_evaluation else self._train(command)

    def _train(self, command: Sequence[str]) -> int:
        keys = keys_of(command)
        method, n = keys["freezing.method"], int(keys.get("training.steps", 60))
        self.started.append(f"train {method} {n}")
        folder = Path(keys["job.dump_folder"], "tb", "x")
        begins = self.begins_with
        settings = {
            "model": {"hf_assets_path": begins or "tokenizer"},
            "checkpoint": {"initial_load_in_hf": begins is not None, "initial_load_path": None},
        }
        seconds = n * (0.5 if method == "apf" else 1.0)
        write_run(folder, method, steps=n, steps_done=n, seconds=seconds, settings=settings,
                  seed=int(keys["debug.seed"]))  # fmt: skip
        rows = [f"{i},,{i * seconds / n},1,1,,,,,,," for i in range(1, n + 1)]
        (folder / "steps.csv").write_text("\n".join([",".join(STEPS.header), *rows]) + "\n")
        return 0

    def _evaluate(self, command: Sequence[str], log: Path) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        for name in ("--output", "--tasks", "--data-dir", "--dtype"):
            parser.add_argument(name)
        parser.add_argument("--limit", type=int)
        words = list(command[4:])
        split = words.index("--") if "--" in words else len(words)
        options = parser.parse_args(words[:split])
        output = Path(options.output)
        name = next((part for part in output.parts if part in ("none", "apf")), output.name)
        name = "peer" if "fewer_steps_for_apf" in output.parts else name
        self.started.append(f"score {name}")
        self.evaluated.append(words)
        log.write_text(f"the log of {name}\n")
        if name in self.fails:
            return 2
        tasks = options.tasks or "mmlu,hellaswag,arc_challenge,truthfulqa_mc1,truthfulqa_mc2"
        is_run = name != "base_model"
        write_scores(
            output, {"none": 0.4, "base_model": 0.3}.get(name, 0.45), limit=options.limit,
            model=options.model, source=options.data_dir or "hub", dtype=options.dtype or "float32",
            tasks="mmlu" if self.asks_too_little else tasks, step=None if not is_run else
            int(re.findall(r"\"steps\": (\d+)", (output / "summary.json").read_text())[0]),
            options=shlex.join(words[split + 1 :]),
        )  # fmt: skip
        return 0


@pytest.fixture(autouse=True)
def lm_eval_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "find_spec", lambda name: name)


def run(
    machine: Machine, folder: Path, *more: str, methods: str = "none apf", config: str = CONFIG
) -> int:
    (folder / "small.toml").write_text(config)
    arguments = ["run", str(folder / "small.toml"), str(folder / "out"), "--schedules", "1F1B"]
    return main([*arguments, "--nproc", "2", "--methods", *methods.split(), *more], starter=machine)


# --- what is scored -------------------------------------------------------------------------------


def test_each_run_is_scored_as_it_finishes_and_the_model_before_training_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    assert run(machine, tmp_path, "--evaluate", methods="none apf fewer_steps") == 0
    assert machine.started == [
        "train none 60", "score none", "train apf 60", "score apf", "train none 30", "score peer",
        "score base_model",
    ]  # fmt: skip
    run_folder = tmp_path / "out/1F1B/none/seed_42"
    assert machine.evaluated[0] == [str(run_folder / "tb/x"), "--output", str(run_folder / "tb/x")]
    assert (run_folder / "evaluate.log").read_text() == "the log of none\n"
    base = tmp_path / "out/base_model"
    assert machine.evaluated[3] == ["models/small", "--output", str(base)]
    assert (base / "evaluate.log").exists()
    printed = capsys.readouterr().out
    assert (
        "The model before training: models/small\n  scores: ... 30.00% on average, 00:00" in printed
    )
    assert "  scores: ... 40.00% on average, 00:00\n" in printed
    told = "Before training, small: average accuracy 30.00%, MMLU 30.00%, HellaSwag 30.00%"
    assert told in (tmp_path / "out/comparison.md").read_text()
    rows = table_rows(printed)
    assert [(row["method"], row[AVERAGE], row[TO_ACCURACY]) for row in rows] == [
        ("none", "40.00", "1.000"), ("apf", "45.00", "0.500"),
        ("fewer_steps_for_apf", "45.00", "0.500"),
    ]  # fmt: skip


def test_what_has_its_scores_is_left_alone(tmp_path: Path) -> None:
    machine = Machine()
    run(machine, tmp_path)
    # Runs that finished before are scored now.
    assert run(machine, tmp_path, "--evaluate=--limit 40") == 0
    assert machine.started[2:] == ["score none", "score apf", "score base_model"]
    assert run(machine, tmp_path, "--evaluate=--limit 40", methods="none apf lisa") == 0
    assert machine.started[5:] == ["train lisa 60", "score x"]


@pytest.mark.parametrize(
    "other",
    ["", "--limit 41", "--limit 40 --tasks mmlu", "--limit 40 --dtype float16",
     "--limit 40 -- --num_fewshot 3", "--limit 40 --data-dir ."],
)  # fmt: skip
def test_other_questions_are_asked_anew(tmp_path: Path, other: str) -> None:
    machine = Machine()
    run(machine, tmp_path, "--evaluate=--limit 40", methods="none")
    assert run(machine, tmp_path, f"--evaluate={other}", methods="none") == 0
    assert machine.started[3:] == ["score none", "score base_model"]


def test_scores_of_an_earlier_step_do_not_count(tmp_path: Path) -> None:
    machine = Machine()
    run(machine, tmp_path, "--evaluate", methods="none")
    folder = tmp_path / "out/1F1B/none/seed_42/tb/x"
    tasks = "mmlu,hellaswag,arc_challenge,truthfulqa_mc1,truthfulqa_mc2"
    write_scores(folder, 0.1, step=30, tasks=tasks)
    assert run(machine, tmp_path, "--evaluate", methods="none") == 0
    assert machine.started[3:] == ["score none"]
    scores = read_scores(folder)
    assert scores is not None
    assert scores.step == 60


def test_a_failed_evaluation_is_shown_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    machine.fails = {"none"}
    assert run(machine, tmp_path, "--evaluate") == 1
    assert machine.started[1:] == ["score none", "train apf 60", "score apf", "score base_model"]
    printed = capsys.readouterr().out
    assert "  scores: ... failed after 00:00 (exit status 2)\n  the end of " in printed
    assert "    the log of none\n" in printed
    assert "not evaluated: 1F1B none seed 42" in table_notes(printed)
    machine.fails = {"base_model"}
    assert run(machine, tmp_path, "--evaluate") == 0
    assert machine.started[5:] == ["score none"]


def test_a_model_before_training_that_cannot_be_scored_is_a_failure(tmp_path: Path) -> None:
    machine = Machine()
    machine.fails = {"base_model"}
    assert run(machine, tmp_path, "--evaluate") == 1


def test_an_evaluation_that_leaves_other_scores_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    machine.asks_too_little = True
    assert run(machine, tmp_path, "--evaluate") == 1
    assert "(no scores of all questions in " in capsys.readouterr().out


def test_runs_that_begin_with_random_weights_have_no_model_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    machine.begins_with = None
    assert run(machine, tmp_path, "--evaluate", methods="none") == 0
    assert machine.started == ["train none 60", "score none"]
    told = "The model before training: not scored, runs began with none that is a Hugging Face"
    assert told in capsys.readouterr().out


# --- the options ----------------------------------------------------------------------------------


def test_options_go_to_evaluate_with_folders_that_hold_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my questions").mkdir()
    monkeypatch.chdir(tmp_path)
    text = (
        "--data-dir 'my questions' --batch-size 4 --limit=40 --tasks mmlu,gsm8k -- --apply_template"
    )
    words = parse_questions(text).arguments(Path("run"), Path("there"))
    assert words == [
        "run", "--batch-size", "4", "--tasks", "mmlu,gsm8k", "--data-dir",
        str(tmp_path / "my questions"), "--limit", "40", "--output", "there",
        "--", "--apply_template",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--output x", "--evaluate has --output; scores go to each run's folder, leave it out"),
        ("--step 3", "--evaluate has --step; the last checkpoint is scored, leave it out"),
        ("--data-dir nowhere", "--evaluate has --data-dir nowhere, which is no folder"),
        ("--data-dir 'x", '--evaluate is "--data-dir \'x": No closing quotation'),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    assert run(machine, tmp_path, f"--evaluate={text}") == 2
    assert message in capsys.readouterr().err
    assert machine.started == []


@pytest.mark.parametrize(
    ("config", "arguments", "status"),
    [
        ("", [], 2),
        ("", ["--", "--checkpoint.enable"], 0),
        (CONFIG, ["--", "--checkpoint.no-enable"], 2),
    ],
)
def test_runs_without_checkpoints_are_refused(
    tmp_path: Path,
    config: str,
    arguments: list[str],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine()
    assert run(machine, tmp_path, "--evaluate", *arguments, config=config) == status
    told = "--evaluate scores checkpoints; set checkpoint.enable in CONFIG"
    assert (told in capsys.readouterr().err) == (machine.started == []) == (status == 2)


def test_lm_eval_is_looked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scoring, "find_spec", lambda name: None)
    machine = Machine()
    assert run(machine, tmp_path, "--evaluate") == 2
    assert "--evaluate needs lm-eval, which is not installed" in capsys.readouterr().err
    assert machine.started == []


# --- the page -------------------------------------------------------------------------------------


def test_the_page_tells_what_was_known_before_training(tmp_path: Path) -> None:
    write_scores(write_run(tmp_path / "a", "none"), 0.5)
    assert "Before training" not in rendered(tmp_path)
    write_scores(tmp_path / "base_model", 0.25, model="models/<b>")
    line = (
        "Before training, \\<b>: average accuracy 25.00%, MMLU 25.00%, HellaSwag 25.00%, "
        "ARC-C 25.00%, TruthfulQA 25.00%."
    )
    assert f"\n\n{line}\n\n| schedule" in rendered(tmp_path)
    page = render_html("t", Table((), (), (), (line,)), [], [], {})
    assert f"<p>{line.replace('<b>', '&lt;b&gt;')}</p>" in page


def test_other_questions_before_training_are_told(tmp_path: Path) -> None:
    write_scores(write_run(tmp_path / "a", "none"), 0.5)
    write_scores(tmp_path / "base_model", 0.25, n_questions=7)
    _, notes = table(tmp_path)
    assert notes[0].startswith("questions differ, so accuracies cannot be compared: ")
    assert "; the model before training: hub: MMLU test 7" in notes[0]


def test_broken_scores_of_the_model_before_training_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "none")
    base = write_scores(tmp_path / "base_model", 0.25)
    (base / "scores.json").write_text("[]")
    rows, notes = table(tmp_path)
    assert len(rows) == 1
    assert notes == [f"not read: {base}: scores.json: scores is []; it must be an object"]
