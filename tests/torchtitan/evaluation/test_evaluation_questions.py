"""Local files as data sets, without lm-eval."""

import json
from pathlib import Path

import datasets
import pytest

from tests.torchtitan.evaluation.question_files import (
    arc_row,
    hellaswag_row,
    mmlu_row,
    truthfulqa_row,
    write_questions,
    write_rows,
)
from timelyfreeze.records.benchmarks import BENCHMARKS
from torchtitan.evaluation.questions import OF_BENCHMARK, SOURCES, LocalQuestions, questions_from


@pytest.fixture
def local(tmp_path: Path) -> LocalQuestions:
    return LocalQuestions(write_questions(tmp_path))


def test_every_benchmark_has_a_source_whose_split_is_the_one_lm_eval_asks() -> None:
    assert {benchmark.key for benchmark in BENCHMARKS} == OF_BENCHMARK.keys()
    for benchmark in BENCHMARKS:
        assert SOURCES[OF_BENCHMARK[benchmark.key]].asked == benchmark.split


def test_a_subject_has_its_rows_in_the_order_of_the_file(local: LocalQuestions) -> None:
    splits = local.load(path="cais/mmlu", name="virology")
    assert set(splits) == {"test", "dev"}
    assert splits["test"].to_list() == [mmlu_row("virology", "validation", n) for n in range(3)]
    assert splits["dev"].to_list() == [mmlu_row("virology", "dev", n) for n in range(12)]
    with pytest.raises(ValueError, match="no rows of the subject 'astrology'"):
        local.load(path="cais/mmlu", name="astrology")


def test_rows_are_those_of_the_files(local: LocalQuestions) -> None:
    arc = local.load(path="allenai/ai2_arc", name="ARC-Challenge")
    assert arc["test"].to_list() == [arc_row("validation", n) for n in range(3)]
    assert arc["train"].to_list() == [arc_row("train", n) for n in range(12)]
    truth = local.load(path="truthfulqa/truthful_qa", name="multiple_choice")
    assert truth["validation"].to_list() == [truthfulqa_row(n) for n in range(3)]
    swag = local.load(path="Rowan/hellaswag", name=None)
    assert swag["validation"].to_list() == [hellaswag_row(n) for n in range(3)]
    assert swag["train"].num_rows == 0
    assert swag["train"].column_names == swag["validation"].column_names


def test_the_split_that_lm_eval_asks_comes_first(local: LocalQuestions, tmp_path: Path) -> None:
    assert local.file("arc_challenge").name == "arc_challenge_validation.jsonl"
    write_rows(tmp_path / "arc_challenge_test.jsonl", [arc_row("test", 7)])
    assert local.file("arc_challenge").name == "arc_challenge_test.jsonl"
    asked = local.load(path="allenai/ai2_arc", name="ARC-Challenge")["test"]
    assert asked.to_list() == [arc_row("test", 7)]


def test_missing_files_are_all_named(local: LocalQuestions, tmp_path: Path) -> None:
    keys = [benchmark.key for benchmark in BENCHMARKS]
    assert local.errors(keys) == []
    for name in ("mmlu_dev", "hellaswag_validation", "truthfulqa_mc_validation"):
        (path,) = tmp_path.glob(f"{name}.*")
        path.unlink()
    assert local.errors(keys) == [
        f"{tmp_path} has none of mmlu_dev.jsonl, mmlu_dev.jsonl.gz",
        f"{tmp_path} has none of hellaswag_validation.jsonl, hellaswag_validation.jsonl.gz",
        f"{tmp_path} has none of truthfulqa_mc_validation.jsonl, truthfulqa_mc_validation.jsonl.gz",
    ]
    assert local.errors(["arc_challenge"]) == []
    missing = tmp_path / "none"
    assert LocalQuestions(missing).errors(keys) == [
        f"--data-dir is '{missing}', which is not a folder"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is list, not an object"),
        (json.dumps({"id": "x", "question": "Why?"}), "line 2 lacks choices, answerKey"),
    ],
)
def test_a_broken_line_is_named(
    local: LocalQuestions, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "arc_challenge_train.jsonl"
    path.write_text(json.dumps(arc_row("train", 0)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"arc_challenge_train.jsonl, {message}"):
        local.load(path="allenai/ai2_arc", name="ARC-Challenge")


@pytest.mark.parametrize(
    ("path", "name"), [("squad", None), ("allenai/ai2_arc", "ARC-Easy"), ("truthfulqa/x", None)]
)
def test_other_data_sets_are_refused(local: LocalQuestions, path: str, name: str | None) -> None:
    with pytest.raises(ValueError, match=f"lm-eval asks for the data set '{path}'"):
        local.load(path=path, name=name)


def test_the_hub_is_back_afterwards(local: LocalQuestions) -> None:
    before = datasets.load_dataset
    with questions_from(local):
        assert datasets.load_dataset == local.load
    assert datasets.load_dataset is before
    with pytest.raises(ValueError, match="squad"), questions_from(local):
        datasets.load_dataset("squad")
    assert datasets.load_dataset is before
