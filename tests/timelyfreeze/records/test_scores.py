"""Averages against the tables of the paper; files written by hand."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.records.scores import (
    BENCHMARKS,
    Score,
    Scores,
    read_scores,
    render_scores,
    scores_from_json,
    scores_to_json,
)

# MMLU, HellaSwag, ARC-C, TruthfulQA and the average, as the paper's Tables 6 to 8 print them.
PAPER = {
    "1B before": (31.99, 47.75, 36.95, 23.01, 34.93),
    "1B 1F1B none": (30.42, 49.34, 37.57, 26.32, 35.91),
    "1B 1F1B timelyfreeze": (31.30, 49.49, 37.80, 26.85, 36.36),
    "8B before": (63.55, 60.00, 51.28, 28.40, 50.81),
    "8B ZBV timelyfreeze": (63.89, 61.59, 55.26, 38.15, 54.72),
    "13B before": (52.38, 60.18, 47.53, 26.81, 46.73),
    "13B GPipe none": (56.33, 60.33, 54.27, 33.41, 51.09),
}


def score(accuracy: float, **changes: Any) -> Score:
    values = {
        "stderr": 0.01,
        "n_questions": 100,
        "questions": "test",
        "n_shots": 5,
        "metric": "mmlu acc",
    }
    return Score(accuracy=accuracy, **{**values, **changes})


def scores(**accuracies: float) -> Scores:
    return Scores(
        model="models/small",
        step=800,
        source="hub",
        limit=None,
        dtype="float32",
        device="cpu",
        versions={"lm_eval": "0.4.13"},
        evaluated_at="2026-11-21T12:00:00+00:00",
        benchmarks={key: score(accuracy) for key, accuracy in accuracies.items()},
    )


ALL = {"mmlu": 0.3, "hellaswag": 0.5, "arc_challenge": 0.4, "truthfulqa_mc1": 0.2}


@pytest.mark.parametrize("name", PAPER)
def test_the_average_is_the_papers(name: str) -> None:
    *columns, printed = PAPER[name]
    keys = [benchmark.key for benchmark in BENCHMARKS if benchmark.counts]
    accuracies = {key: value / 100 for key, value in zip(keys, columns, strict=True)}
    # Each of the five was rounded to two digits.
    assert 100 * (scores(**accuracies).average or 0.0) == pytest.approx(printed, abs=0.0101)


def test_the_titles_are_in_the_order_of_the_papers_columns() -> None:
    assert [(b.title, b.n_shots) for b in BENCHMARKS if b.counts] == [
        ("MMLU", 5), ("HellaSwag", 0), ("ARC-C", 10), ("TruthfulQA", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("title", "n_questions"), [("TruthfulQA", 817), ("ARC-C", 1172)], ids=["mc1", "acc"]
)
def test_the_papers_metrics_are_shares_of_questions(title: str, n_questions: int) -> None:
    """Scores of one model are whole numbers of right answers: mc1 counts them, mc2 does not."""
    column = [b.title for b in BENCHMARKS if b.counts].index(title)
    for name in ("1B before", "8B before", "13B before", "13B GPipe none"):
        printed = PAPER[name][column]
        n_right = round(printed / 100 * n_questions)
        assert f"{100 * n_right / n_questions:.2f}" == f"{printed:.2f}"


def test_no_average_without_all_four_and_mc2_has_no_say() -> None:
    assert scores(**ALL, truthfulqa_mc2=0.9).average == pytest.approx(0.35)
    for key in ALL:
        assert scores(**{k: v for k, v in ALL.items() if k != key}).average is None


def test_what_is_written_is_read_back() -> None:
    text = scores_to_json(scores(**ALL, truthfulqa_mc2=0.45))
    assert json.loads(text)["average"] == pytest.approx(0.35)
    assert scores_from_json(text) == scores(**ALL, truthfulqa_mc2=0.45)
    partial = scores_to_json(scores(mmlu=0.3))
    assert json.loads(partial)["average"] is None
    assert scores_from_json(partial).average is None


def test_a_folder_without_scores_has_none(tmp_path: Path) -> None:
    assert read_scores(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmarks": []}, "benchmarks is []; it must be an object"),
        ({"benchmarks": {"squad": {}}}, "a key of scores.benchmarks is 'squad'; known: mmlu, "),
        ({"benchmarks": {"mmlu": 0.3}}, "mmlu is 0.3; it must be an object"),
        ({"benchmarks": {"mmlu": {"accuracy": 0.3}}}, "mmlu lacks stderr, n_questions, "),
        ({"step_": 3}, "scores has unknown fields: step_"),
        ({"further": {"gsm8k": 3}}, "further.gsm8k is 3; it must be an object"),
        ({"further": {"gsm8k": {"em,x": "1"}}}, "further.gsm8k.em,x is '1'; it must be a number"),
        ({"\ud800": 3}, "scores has unknown fields: \\ud800"),
        ({"benchmarks": {"9" * 5000: {}}}, "a key of scores.benchmarks is '99999"),
    ],
)
def test_what_is_no_scores_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {**json.loads(scores_to_json(scores(**ALL))), **change}
    (tmp_path / "scores.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"^scores.json: .*{re.escape(message)}"):
        read_scores(tmp_path)


@pytest.mark.parametrize(
    ("accuracy", "rule"),
    [(wrong, r"lie in \[0, 1\]") for wrong in (1.01, -0.1, math.nan, 34.9)]
    + [(None, "be a number")],
)
def test_an_accuracy_is_a_fraction(accuracy: float | None, rule: str) -> None:
    values = json.loads(scores_to_json(scores(**ALL)))
    values["benchmarks"]["mmlu"]["accuracy"] = accuracy
    with pytest.raises(ValueError, match=rf"mmlu.accuracy is .*; it must {rule}"):
        scores_from_json(json.dumps(values))


def test_scores_are_of_a_question_or_more() -> None:
    values = json.loads(scores_to_json(scores(**ALL)))
    values["benchmarks"]["mmlu"]["n_questions"] = 0
    with pytest.raises(ValueError, match=r"mmlu.n_questions is 0; it must be 1 or more"):
        scores_from_json(json.dumps(values))


def test_the_table_is_in_percent() -> None:
    lines = render_scores(scores(**ALL)).splitlines()
    assert lines[2] == "| MMLU | 5 | mmlu acc | 100 of test | 30.00 +- 1.00 |"
    assert lines[-1] == "| average of four | | | | 35.00 |"
    assert "average" not in render_scores(scores(mmlu=0.3))
