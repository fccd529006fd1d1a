"""The command line of `timelyfreeze evaluate`, with a stand-in for lm-eval."""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.timelyfreeze.compare.run_folders import table_rows
from tests.torchtitan.evaluation.question_files import write_questions
from timelyfreeze.compare.runs.scoring import parse_questions
from timelyfreeze.records.scores import BENCHMARKS, read_scores
from torchtitan.evaluation.command import check, main
from torchtitan.evaluation.harness import run_lm_eval

ACCURACY = {
    "mmlu": 0.25,
    "hellaswag": 0.5,
    "arc_challenge": 0.375,
    "truthfulqa_mc1": 0.125,
    "truthfulqa_mc2": 0.75,
}
FURTHER = {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.25, "word_perplexity,none": 9}


class StandIn:
    """lm-eval with known results; fails at a task if asked to, and knows no other than gsm8k."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at
        self.validated: list[str] = []
        self.asked: list[dict[str, str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.further: list[str] = []

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        command, *words = arguments
        if command == "validate":
            self.validated += words
            if words[1] != "gsm8k":
                raise ValueError("not known")
            return
        at = words.index("--log_samples") if "--log_samples" in words else len(words)
        self.further = words[at:]
        options = dict(zip(words[:at:2], words[1:at:2], strict=True))
        task = options["--tasks"]
        if task == self.fails_at:
            raise ValueError("no rows")
        self.asked.append(options)
        self.environments.append(environment)
        metrics: dict[str, object] = {"alias": task, "acc,none": ACCURACY.get(task)}
        results = {
            "results": {task: metrics if task in ACCURACY else {"alias": task, **FURTHER}},
            "n-samples": {task: {"original": 20, "effective": 10}},
            "n-shot": {task: int(options.get("--num_fewshot", 3))},
            "lm_eval_version": "0.0",
            "transformers_version": "0.1",
        }
        folder = Path(options["--output_path"], "a_model")
        folder.mkdir(parents=True)
        (folder / "results_2026.json").write_text(json.dumps(results))


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a,model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs/tb/a_run"
    folder.mkdir(parents=True)
    settings = {"metrics": {"save_tb_folder": "tb"}, "checkpoint": {"folder": "checkpoint"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "outputs/checkpoint/step-60").mkdir(parents=True)
    (tmp_path / "outputs/checkpoint/step-60/.metadata").touch()
    return folder


def test_scores_of_a_folder_stand_in_the_folder(
    hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    assert main([str(hf_folder), "--device", "cpu"], runner=stand_in) == 0
    assert stand_in.validated == []
    for options, benchmark in zip(stand_in.asked, BENCHMARKS, strict=True):
        assert json.loads(options.pop("--model_args")) == {
            "pretrained": str(hf_folder), "dtype": "float32",
        }  # fmt: skip
        assert options == {
            "--model": "hf", "--tasks": benchmark.task, "--num_fewshot": str(benchmark.n_shots),
            "--device": "cpu", "--batch_size": "8",
            "--output_path": str(hf_folder / "lm_eval" / benchmark.key),
        }  # fmt: skip
    scores = read_scores(hf_folder)
    assert scores is not None
    assert {key: score.accuracy for key, score in scores.benchmarks.items()} == ACCURACY
    assert scores.average == 0.3125
    assert (scores.source, scores.limit, scores.step) == ("hub", None, None)
    assert (scores.versions["lm_eval"], scores.versions["transformers"]) == ("0.0", "0.1")
    rows = table_rows(capsys.readouterr().out)
    assert [(row["benchmark"], row["accuracy, %"]) for row in rows] == [
        ("MMLU", "25.00"), ("HellaSwag", "50.00"), ("ARC-C", "37.50"), ("TruthfulQA", "12.50"),
        ("TruthfulQA mc2 (not in the average)", "75.00"), ("average of four", "31.25"),
    ]  # fmt: skip


def test_scores_of_a_run_stand_beside_it_and_in_its_tensorboard(run: Path, hf_folder: Path) -> None:
    def exporter(folder: Path, step: int) -> Path:
        assert (folder, step) == (run, 60)
        return hf_folder

    stand_in = StandIn()
    assert main([str(run), "--limit", "3"], runner=stand_in, exporter=exporter) == 0
    assert [options["--limit"] for options in stand_in.asked] == ["1", "3", "3", "3", "3"]
    scores = read_scores(run)
    assert scores is not None
    assert (scores.step, scores.limit, scores.model) == (60, 3, str(hf_folder))
    assert read_scores(hf_folder) is None
    expected = {**ACCURACY, "average": 0.3125}
    assert tensorboard(run) == {
        f"accuracy(%)/{key}": [(60, 100 * value)] for key, value in expected.items()
    }


def tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_any_task_of_lm_eval_is_scored(
    run: Path, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    arguments = [str(run), "--tasks", "gsm8k,hellaswag", "--limit", "5", "--", "--log_samples",
                 "--include_path", "tasks"]  # fmt: skip
    assert main(arguments, runner=stand_in, exporter=lambda *_: hf_folder) == 0
    assert stand_in.validated == ["--tasks", "gsm8k", "--include_path", "tasks"]
    assert [options["--tasks"] for options in stand_in.asked] == ["hellaswag", "gsm8k"]
    assert "--num_fewshot" not in stand_in.asked[1]
    assert stand_in.asked[1]["--limit"] == "5"
    assert stand_in.further == ["--log_samples", "--include_path", "tasks"]
    scores = read_scores(run)
    assert scores is not None
    assert scores.further == {"gsm8k": FURTHER}
    assert scores.options == "--log_samples --include_path tasks"
    assert scores.asked.endswith(", with --log_samples --include_path tasks")
    printed = capsys.readouterr().out
    assert "| gsm8k | exact_match,strict | 0.5 +- 0.25 |\n" in printed
    assert "| gsm8k | word_perplexity,none | 9 |\n" in printed
    assert tensorboard(run)["lm_eval/gsm8k/word_perplexity,none"] == [(60, 9.0)]


def test_a_task_that_lm_eval_does_not_know_is_told_before_the_export(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    arguments = [str(run), "--tasks", "squadx"]
    assert main(arguments, runner=stand_in, exporter=lambda *_: pytest.fail("exported")) == 2
    assert capsys.readouterr().err == "error: not known\n"
    assert stand_in.asked == []


def test_what_was_asked_before_a_failure_is_kept(
    hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(hf_folder)], runner=StandIn(fails_at="arc_challenge")) == 2
    scores = read_scores(hf_folder)
    assert scores is not None
    assert list(scores.benchmarks) == ["mmlu", "hellaswag"]
    assert scores.average is None
    assert capsys.readouterr().err == "error: no rows\n"


def test_results_that_lm_eval_could_not_write_are_told(
    hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(hf_folder)], runner=lambda *_: None) == 2
    assert "lm-eval has written no results_*.json below " in capsys.readouterr().err


def test_some_benchmarks_give_no_average(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(hf_folder), "--output", str(tmp_path / "new/place"), "--tasks"]
    assert main([*arguments, "truthfulqa_mc1,hellaswag"], runner=StandIn()) == 0
    printed = capsys.readouterr()
    assert printed.err == "No average: mmlu, arc_challenge left out\n"
    assert "average" not in printed.out.replace("not in the average", "")
    scores = read_scores(tmp_path / "new/place")
    assert scores is not None
    assert list(scores.benchmarks) == ["hellaswag", "truthfulqa_mc1"]


def test_local_questions_are_looked_for_before_a_model_is_loaded(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="its task files are included")
    files = write_questions(tmp_path / "files")
    stand_in = StandIn()
    arguments = [str(hf_folder), "--data-dir", str(files)]
    assert main([*arguments, "--tasks", "hellaswag"], runner=stand_in) == 0
    assert stand_in.environments[0]["HF_HUB_OFFLINE"] == "1"
    assert not Path(stand_in.asked[0]["--include_path"]).exists()
    scores = read_scores(hf_folder)
    assert scores is not None
    assert scores.source == str(files)
    assert scores.benchmarks["hellaswag"].questions == "hellaswag_validation.jsonl.gz"
    (files / "mmlu_dev.jsonl").unlink()
    (files / "arc_challenge_train.jsonl").unlink()
    capsys.readouterr()
    assert main(arguments, runner=stand_in) == 2
    error = capsys.readouterr().err
    assert "none of mmlu_dev.jsonl" in error
    assert "none of arc_challenge_train.jsonl" in error
    assert len(stand_in.asked) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit is 0; it must be 1 or more"),
        (["--tasks", "mmlu,,squad"], "--tasks has ''; it must be names with commas between"),
        (["--step", "5"], "--step is 5, but "),
    ],
)
def test_errors_are_told(
    arguments: list[str], message: str, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    assert main([str(hf_folder), *arguments], runner=stand_in) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert stand_in.asked == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit is 0; it must be 1 or more"),
        (["--dtype", "int8"], "--dtype is 'int8'; known: float32, bfloat16, float16"),
        (["--data-dir", ".", "--tasks", "gsm8k"], "--data-dir knows no files for 'gsm8k'"),
    ],
)
def test_options_can_be_checked_without_a_model(arguments: list[str], message: str) -> None:
    check(["no_model_yet", "--limit", "3"])
    with pytest.raises(ValueError, match=re.escape(message)):
        check(["no_model_yet", *arguments])


def test_an_output_that_is_a_file_is_told_at_once(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    stand_in = StandIn()
    assert main([str(hf_folder), "--output", str(tmp_path / "file")], runner=stand_in) == 2
    assert f"error: scores go to {tmp_path / 'file'}, but " in capsys.readouterr().err
    assert stand_in.asked == []


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("", "--limit 5"),
        ("--tasks hellaswag,gsm8k --limit 5", "--tasks gsm8k --limit 5"),
        ("--limit=5 --dtype float32 -- --log_samples 'a b'", "--limit 5 --dtype float32"),
    ],
)
def test_a_comparison_knows_which_questions_gave_the_scores(
    run: Path, hf_folder: Path, text: str, others: str
) -> None:
    questions = parse_questions(text)
    words = questions.arguments(run, run)
    assert main(words, runner=StandIn(), exporter=lambda *_: hf_folder) == 0
    scores = read_scores(run)
    assert scores is not None
    assert questions.are_answered_in(scores)
    assert not parse_questions(others).are_answered_in(scores)


def test_scores_of_some_tasks_are_not_those_of_all(hf_folder: Path) -> None:
    assert main([str(hf_folder)], runner=StandIn(fails_at="truthfulqa_mc2")) == 2
    scores = read_scores(hf_folder)
    assert scores is not None
    assert not parse_questions("").are_answered_in(scores)


@pytest.mark.usefixtures("heeded")
def test_lm_eval_ends_with_the_process_that_runs_it_and_leaves_ctrl_c_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    os.mkfifo(tmp_path / "started")
    sleeper = (
        "import os, signal, time\n"
        "is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "open({!r}, 'w').write(f'{{os.getpid()}} {{is_deaf}}')\n"
        "time.sleep(600)\n"
    )
    (package / "__main__.py").write_text(sleeper.format(str(tmp_path / "started")))
    monkeypatch.syspath_prepend(tmp_path)
    process = multiprocessing.get_context("fork").Process(
        target=run_lm_eval, args=([], {"PYTHONPATH": str(tmp_path)})
    )
    process.start()
    number, is_deaf = (tmp_path / "started").read_text().split()
    assert is_deaf == "True"
    started = int(number)
    process.terminate()
    process.join(timeout=30)
    assert process.exitcode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


@pytest.mark.slow
def test_an_lm_eval_that_fails_is_told() -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match=r"-m lm_eval run --odd ended with status 2"):
        run_lm_eval(["run", "--odd"], {})
