"""Local files as task files, without lm-eval: a folder stands for that of its tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.evaluation.question_files import (
    SUBJECTS,
    arc_row,
    hellaswag_row,
    mmlu_row,
    truthfulqa_row,
    write_questions,
    write_rows,
)
from timelyfreeze.records.scores import BENCHMARKS
from torchtitan.evaluation import harness as questions
from torchtitan.evaluation.harness import SOURCES, find_files, write_tasks

KEYS = [benchmark.key for benchmark in BENCHMARKS]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tasks = tmp_path / "lm_eval/tasks"
    for source in SOURCES.values():
        for name in SUBJECTS if "*" in source.tasks else ["*"]:
            file = tasks / source.tasks.replace("*", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    monkeypatch.setattr(questions, "lm_eval_tasks", lambda: tasks)
    return write_questions(tmp_path / "files")


def load(local: Path, key: str, task: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """A task file, and the rows of each split that it names."""
    folder = local.parent / f"written_{key}"
    folder.mkdir(exist_ok=True)
    write_tasks(find_files(local, [key])[key], key, folder)
    found = json.loads((folder / f"{task}.yaml").read_text())
    files = found.pop("dataset_kwargs")["data_files"]
    rows = {
        split: [json.loads(line) for line in Path(file).read_text().splitlines()]
        for split, file in files.items()
    }
    return found, rows


def test_every_benchmark_has_a_source() -> None:
    assert set(KEYS) == SOURCES.keys()


def test_a_subject_has_its_rows_in_the_order_of_the_file(local: Path) -> None:
    task, splits = load(local, "mmlu", "mmlu_virology")
    assert task == {
        "include": str(local.parent / "lm_eval/tasks/mmlu/default/mmlu_virology.yaml"),
        "dataset_path": "json",
        "dataset_name": None,
    }
    assert splits["test"] == [mmlu_row("virology", "validation", n) for n in range(3)]
    assert splits["dev"] == [mmlu_row("virology", "dev", n) for n in range(12)]
    (local.parent / "lm_eval/tasks/mmlu/default/mmlu_astrology.yaml").touch()
    with pytest.raises(ValueError, match="nothing of the subject 'astrology'"):
        load(local, "mmlu", "mmlu_virology")


def test_rows_are_those_of_the_files(local: Path) -> None:
    _, arc = load(local, "arc_challenge", "arc_challenge")
    assert arc == {
        "test": [arc_row("validation", n) for n in range(3)],
        "train": [arc_row("train", n) for n in range(12)],
    }
    _, truth = load(local, "truthfulqa_mc1", "truthfulqa_mc1")
    assert truth == {"validation": [truthfulqa_row(n) for n in range(3)]}
    task, swag = load(local, "hellaswag", "hellaswag")
    assert swag == {"validation": [hellaswag_row(n) for n in range(3)]}
    assert task["training_split"] is None


def test_the_split_that_lm_eval_asks_comes_first(local: Path) -> None:
    files = find_files(local, ["arc_challenge"])["arc_challenge"]
    assert files["test"].name == "arc_challenge_validation.jsonl"
    write_rows(local / "arc_challenge_test.jsonl", [arc_row("test", 7)])
    files = find_files(local, ["arc_challenge"])["arc_challenge"]
    assert files["test"].name == "arc_challenge_test.jsonl"
    assert load(local, "arc_challenge", "arc_challenge")[1]["test"] == [arc_row("test", 7)]


def test_missing_files_are_all_named(local: Path) -> None:
    assert list(find_files(local, KEYS)) == KEYS
    for name in ("mmlu_dev", "hellaswag_validation", "truthfulqa_mc_validation"):
        (path,) = local.glob(f"{name}.*")
        path.unlink()
    with pytest.raises(ValueError, match="has none of") as told:
        find_files(local, KEYS)
    assert [line.strip() for line in str(told.value).split("\n")] == [
        f"{local} has none of mmlu_dev.jsonl, mmlu_dev.jsonl.gz",
        f"{local} has none of hellaswag_validation.jsonl, hellaswag_validation.jsonl.gz",
        f"{local} has none of truthfulqa_mc_validation.jsonl, truthfulqa_mc_validation.jsonl.gz",
    ]
    assert find_files(local, ["arc_challenge"])
    with pytest.raises(ValueError, match="--data-dir is 'no/such', which is not a folder"):
        find_files(Path("no/such"), KEYS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not valid JSON"),
        ("[1]", "line 2: is a list without question, choices, answerKey"),
        (json.dumps({"question": "Why?"}), "line 2: is an object without choices, answerKey"),
    ],
)
def test_a_broken_line_is_named(local: Path, line: str, message: str) -> None:
    path = local / "arc_challenge_train.jsonl"
    path.write_text(json.dumps(arc_row("train", 0)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"arc_challenge_train.jsonl, {message}"):
        load(local, "arc_challenge", "arc_challenge")


@pytest.mark.parametrize("task", ["squad", "arc_easy", "truthfulqa_gen"])
def test_other_tasks_are_refused(local: Path, task: str) -> None:
    with pytest.raises(ValueError, match=f"--data-dir knows no files for '{task}'; known: mmlu, "):
        find_files(local, ["mmlu", task])
