"""The command line of evaluate.py, with a stand-in for the model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.timelyfreeze.compare.run_folders import table_rows
from tests.torchtitan.evaluation.question_files import write_questions
from timelyfreeze.records.benchmarks import Benchmark
from timelyfreeze.records.scores import Score, read_scores
from torchtitan.evaluation import model as evaluation_model
from torchtitan.evaluation.command import Settings, main

ACCURACY = {
    "mmlu": 0.25,
    "hellaswag": 0.5,
    "arc_challenge": 0.375,
    "truthfulqa_mc1": 0.125,
    "truthfulqa_mc2": 0.75,
}


class StandIn:
    """A model with known accuracies; fails at a benchmark if asked to."""

    dtype, device = "float32", "cpu"

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at
        self.opened: list[tuple[Path, Settings]] = []

    def __call__(self, folder: Path, settings: Settings) -> tuple["StandIn", dict[str, str]]:
        self.opened.append((folder, settings))
        return self, {"lm_eval": "0.0"}

    def score(self, benchmark: Benchmark) -> Score:
        if benchmark.key == self.fails_at:
            raise ValueError("no rows")
        return Score(ACCURACY[benchmark.key], None, 10, "test", benchmark.n_shots, "acc")


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "outputs/tb/a_run"
    folder.mkdir(parents=True)
    settings = {"metrics": {"save_tb_folder": "tb"}, "checkpoint": {"folder": "checkpoint"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "outputs/checkpoint/step-60").mkdir(parents=True)
    (tmp_path / "outputs/checkpoint/step-60/.metadata").touch()
    (tmp_path / "export_hf.sh").touch()
    monkeypatch.setattr(evaluation_model, "EXPORT", tmp_path / "export_hf.sh")
    return folder


def test_scores_of_a_folder_stand_in_the_folder(
    hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    assert main([str(hf_folder)], opener=stand_in) == 0
    assert stand_in.opened == [(hf_folder, Settings())]
    scores = read_scores(hf_folder)
    assert scores is not None
    assert {key: score.accuracy for key, score in scores.benchmarks.items()} == ACCURACY
    assert scores.average == 0.3125
    assert (scores.source, scores.limit, scores.step) == ("hub", None, None)
    rows = table_rows(capsys.readouterr().out)
    assert [(row["benchmark"], row["accuracy, %"]) for row in rows] == [
        ("MMLU", "25.00"), ("HellaSwag", "50.00"), ("ARC-C", "37.50"), ("TruthfulQA", "12.50"),
        ("TruthfulQA mc2 (not in the average)", "75.00"), ("average of four", "31.25"),
    ]  # fmt: skip


def test_scores_of_a_run_stand_beside_it_and_in_its_tensorboard(run: Path, hf_folder: Path) -> None:
    def runner(command: Sequence[str]) -> str:
        assert list(command[1:]) == [str(run), "60"]
        return f"{hf_folder}\n"

    stand_in = StandIn()
    assert main([str(run), "--limit", "3"], opener=stand_in, runner=runner) == 0
    assert stand_in.opened == [(hf_folder, replace(Settings(), limit=3))]
    scores = read_scores(run)
    assert scores is not None
    assert (scores.step, scores.limit, scores.model) == (60, 3, str(hf_folder))
    assert read_scores(hf_folder) is None
    events = EventAccumulator(str(run)).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    expected = {**ACCURACY, "average": 0.3125}
    assert found == {f"accuracy(%)/{key}": [(60, 100 * value)] for key, value in expected.items()}


def test_what_was_asked_before_a_failure_is_kept(
    hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(hf_folder)], opener=StandIn(fails_at="arc_challenge")) == 2
    scores = read_scores(hf_folder)
    assert scores is not None
    assert list(scores.benchmarks) == ["mmlu", "hellaswag"]
    assert scores.average is None
    assert capsys.readouterr().err == "error: no rows\n"


def test_some_benchmarks_give_no_average(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(hf_folder), "--output", str(tmp_path / "new/place"), "--benchmarks"]
    assert main([*arguments, "truthfulqa_mc1", "hellaswag"], opener=StandIn()) == 0
    printed = capsys.readouterr()
    assert printed.err == "No average: mmlu, arc_challenge left out\n"
    assert "average" not in printed.out.replace("not in the average", "")
    scores = read_scores(tmp_path / "new/place")
    assert scores is not None
    assert list(scores.benchmarks) == ["hellaswag", "truthfulqa_mc1"]


def test_local_questions_are_looked_for_before_a_model_is_loaded(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    files = write_questions(tmp_path / "files")
    stand_in = StandIn()
    assert main([str(hf_folder), "--data-dir", str(files)], opener=stand_in) == 0
    assert stand_in.opened[0][1].data_dir == files
    scores = read_scores(hf_folder)
    assert scores is not None
    assert scores.source == str(files)
    (files / "mmlu_dev.jsonl").unlink()
    (files / "arc_challenge_train.jsonl").unlink()
    capsys.readouterr()
    assert main([str(hf_folder), "--data-dir", str(files)], opener=stand_in) == 2
    error = capsys.readouterr().err
    assert "none of mmlu_dev.jsonl" in error
    assert "none of arc_challenge_train.jsonl" in error
    assert len(stand_in.opened) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit is 0; it must be 1 or more"),
        (["--benchmarks", "mmlu", "squad"], "--benchmarks has squad; known: mmlu, hellaswag"),
        (["--step", "5"], "--step is 5, but "),
    ],
)
def test_errors_are_told(
    arguments: list[str], message: str, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn()
    assert main([str(hf_folder), *arguments], opener=stand_in) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert stand_in.opened == []


def test_an_output_that_is_a_file_is_told_at_once(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    stand_in = StandIn()
    assert main([str(hf_folder), "--output", str(tmp_path / "file")], opener=stand_in) == 2
    assert f"error: --output is {tmp_path / 'file'}: " in capsys.readouterr().err
    assert stand_in.opened == []
