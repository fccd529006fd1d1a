"""The scores of a model, as in ``scores.json``. Needs no lm-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from timelyfreeze.files import Fraction, OneOf, Within, markdown_table, parse_json, read_dataclass

SCORES = "scores.json"
HUB = "hub"


@dataclass(frozen=True)
class Score:
    """Result of a benchmark."""

    accuracy: Fraction
    stderr: float | None  # standard error over the questions, None if lm-eval gives none
    n_questions: Annotated[int, Within(1)]  # how many were asked
    questions: str  # where they are from: a split of the hub's data set, or the name of a file
    n_shots: int  # solved examples before each question
    metric: str  # lm-eval's name of the metric
    others: Mapping[str, float] = field(default_factory=dict)  # such as ``acc_norm``


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a model."""

    model: str  # the Hugging Face folder that was scored
    step: int | None  # training step of its weights, None where it is not known
    source: str  # ``hub``, or the folder that questions were read from
    limit: int | None  # questions of each benchmark that were asked for; None for all
    dtype: str  # type that the model computed in
    device: str  # where it computed
    versions: Mapping[str, str]  # of lm-eval, transformers and torch
    evaluated_at: str  # ISO 8601 time with offset
    benchmarks: Mapping[Annotated[str, OneOf(*BY_KEY)], Score]  # by key
    # of other tasks of lm-eval, by task and metric
    further: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    options: str = ""  # further options that lm-eval was given
    tasks: str = ""  # names of the tasks that were asked, with commas between

    @property
    def average(self) -> float | None:
        """Mean accuracy of the paper's four benchmarks; None if any was not run."""
        if any(key not in self.benchmarks for key in AVERAGED):
            return None
        return sum(self.benchmarks[key].accuracy for key in AVERAGED) / len(AVERAGED)

    @property
    def asked(self) -> str:
        """The questions asked; only scores of the same questions compare."""
        names = ", ".join(
            f"{BY_KEY[key].title} {score.questions} {score.n_questions:,}"
            for key, score in self.benchmarks.items()
        )
        place = "hub" if self.source == HUB else "local files"
        return f"{place}: {names}" + (f", with {self.options}" if self.options else "")


def scores_to_json(scores: Scores) -> str:
    """Return the scores as a JSON object, with ``average`` for readers of the file."""
    return json.dumps({"average": scores.average, **asdict(scores)}, indent=2) + "\n"


def scores_from_json(text: str) -> Scores:
    """Read the scores of :func:`scores_to_json`; anything else is a ValueError."""
    values = parse_json(text)
    if isinstance(values, dict):
        values.pop("average", None)
    scores = read_dataclass(Scores, values, "scores")
    ordered = {key: scores.benchmarks[key] for key in BY_KEY if key in scores.benchmarks}
    return replace(scores, benchmarks=ordered)


def read_scores(folder: Path) -> Scores | None:
    """Return the scores in ``folder``, None without; a ValueError for other content."""
    path = folder / SCORES
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return scores_from_json(text)
    except ValueError as error:
        raise ValueError(f"{SCORES}: {error}") from None


def render_scores(scores: Scores) -> str:
    """Return tables as markdown: the benchmarks in percent, then metrics as lm-eval gives them."""
    rows = []
    for benchmark in (one for one in BENCHMARKS if one.key in scores.benchmarks):
        score = scores.benchmarks[benchmark.key]
        spread = "" if score.stderr is None else f" +- {100 * score.stderr:.2f}"
        title = benchmark.title + ("" if benchmark.counts else " (not in the average)")
        questions = f"{score.n_questions:,} of {score.questions}"
        accuracy = f"{100 * score.accuracy:.2f}{spread}"
        rows.append([title, str(score.n_shots), score.metric, questions, accuracy])
    if scores.average is not None:
        rows.append(["average of four", "", "", "", f"{100 * scores.average:.2f}"])
    header = ["benchmark", "shots", "metric", "questions", "accuracy, %"]
    tables = [markdown_table(header, rows)] if rows else []
    further = []
    for task, metrics in scores.further.items():
        for name, value in metrics.items():
            if "_stderr," not in name:
                error = metrics.get(name.replace(",", "_stderr,", 1)) if "," in name else None
                spread = "" if error is None else f" +- {error:.2g}"
                further.append([task, name, f"{value:.4g}{spread}"])
    if further:
        tables.append(markdown_table(["task", "metric", "value"], further))
    return "\n\n".join(tables) + "\n"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of lm-eval."""

    key: str  # its name here and in files
    title: str  # its name in tables, as the paper has it
    task: str  # name of lm-eval's task or group of tasks
    n_shots: int  # solved examples before each question
    metric: str = "acc"  # lm-eval's metric that is the accuracy
    split: str = "validation"  # the split that lm-eval asks questions from
    n_tasks: int = 1  # tasks of lm-eval that it is made of; MMLU has one for each subject
    counts: bool = True  # whether it is one of the four that the average is over

    def limit_of_task(self, limit: int | None) -> int | None:
        """Return the questions per task for about ``limit`` in total; None for all."""
        return None if limit is None else -(-limit // self.n_tasks)


BENCHMARKS = (
    Benchmark("mmlu", "MMLU", "mmlu", 5, split="test", n_tasks=57),
    Benchmark("hellaswag", "HellaSwag", "hellaswag", 0),
    Benchmark("arc_challenge", "ARC-C", "arc_challenge", 10, split="test"),
    Benchmark("truthfulqa_mc1", "TruthfulQA", "truthfulqa_mc1", 0),
    Benchmark("truthfulqa_mc2", "TruthfulQA mc2", "truthfulqa_mc2", 0, counts=False),
)
BY_KEY = {benchmark.key: benchmark for benchmark in BENCHMARKS}
AVERAGED = tuple(benchmark.key for benchmark in BENCHMARKS if benchmark.counts)
