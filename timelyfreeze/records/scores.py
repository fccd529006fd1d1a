"""The scores of one model as one value: what ``scores.json`` holds.

Imports the standard library alone, so that scripts can read scores without lm-eval.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from timelyfreeze.files import keys_of, listed, number_of, shown
from timelyfreeze.records.benchmarks import BENCHMARKS, BY_KEY, average_accuracy

SCORES = "scores.json"
HUB = "hub"


@dataclass(frozen=True)
class Score:
    """How one benchmark went.

    Attributes:
        accuracy: In [0, 1].
        stderr: Standard error of the accuracy over the questions, None if lm-eval gives none.
        n_questions: How many were asked.
        questions: Where they are from: a split of the hub's data set, or the name of a file.
        n_shots: Solved examples before each question.
        metric: lm-eval's name of the metric.
        others: Further metrics of lm-eval, such as ``acc_norm``.
    """

    accuracy: float
    stderr: float | None
    n_questions: int
    questions: str
    n_shots: int
    metric: str
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a model.

    Attributes:
        model: The Hugging Face folder that was scored.
        step: Training step of its weights, None where it is not known.
        source: ``hub``, or the folder that questions were read from.
        limit: Questions of each benchmark that were asked for; None for all.
        dtype: Type that the model computed in.
        device: Where it computed.
        versions: Of lm-eval, transformers and torch.
        evaluated_at: ISO 8601 time with offset.
        benchmarks: Scores by the key of their benchmark.
        further: Metrics of other tasks of lm-eval, by task and by lm-eval's name of the metric.
        options: Further options that lm-eval was given.
    """

    model: str
    step: int | None
    source: str
    limit: int | None
    dtype: str
    device: str
    versions: Mapping[str, str]
    evaluated_at: str
    benchmarks: Mapping[str, Score]
    further: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    options: str = ""

    @property
    def average(self) -> float | None:
        """Mean accuracy of the four benchmarks of the paper; None if one was not run."""
        return average_accuracy({key: score.accuracy for key, score in self.benchmarks.items()})

    @property
    def asked(self) -> str:
        """What was asked; only scores with the same can be compared."""
        names = ", ".join(
            f"{BY_KEY[key].title} {score.questions} {score.n_questions:,}"
            for key, score in self.benchmarks.items()
        )
        place = "hub" if self.source == HUB else "local files"
        return f"{place}: {names}" + (f", with {self.options}" if self.options else "")


def scores_to_json(scores: Scores) -> str:
    """Return the scores as a JSON object; ``average`` stands in it for readers of the file."""
    return json.dumps({"average": scores.average, **asdict(scores)}, indent=2) + "\n"


def scores_from_json(text: str) -> Scores:
    """Read what :func:`scores_to_json` wrote.

    Raises:
        ValueError: If the text is no JSON object, lacks a field or has an unknown one, names an
            unknown benchmark, or holds an accuracy outside [0, 1] or of no questions.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"no JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"scores are a JSON object, not {type(values).__name__}")
    values.pop("average", None)
    found = values.get("benchmarks")
    if not isinstance(found, dict):
        raise ValueError(f"benchmarks is {shown(found)}; it must be an object")
    if unknown := sorted(found.keys() - BY_KEY.keys()):
        raise ValueError(f"unknown benchmarks {listed(unknown)}; known: {', '.join(BY_KEY)}")
    for key, row in found.items():
        if isinstance(row, dict) and "accuracy" in row and not _is_fraction(row["accuracy"]):
            raise ValueError(f"{key}.accuracy is {shown(row['accuracy'])}; it must lie in [0, 1]")
    benchmarks = {key: _read(Score, found[key], key) for key in BY_KEY if key in found}
    for key, score in benchmarks.items():
        if score.n_questions < 1:
            raise ValueError(f"{key}.n_questions is {score.n_questions}; it must be 1 or more")
    scores: Scores = _read(Scores, {**values, "benchmarks": benchmarks}, "scores")
    for task, metrics in scores.further.items():
        where = f"further.{listed([task])}"
        for name in keys_of(where, metrics):
            number_of(f"{where}.{listed([name])}", metrics[name])
    return scores


def read_scores(folder: Path) -> Scores | None:
    """Return the scores in ``folder``, None if there are none.

    Raises:
        ValueError: If the file does not hold scores.
    """
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
    lines = []
    for benchmark in BENCHMARKS:
        score = scores.benchmarks.get(benchmark.key)
        if score is None:
            continue
        spread = "" if score.stderr is None else f" +- {100 * score.stderr:.2f}"
        title = benchmark.title + ("" if benchmark.counts else " (not in the average)")
        lines.append(
            f"| {title} | {score.n_shots} | {score.metric} | {score.n_questions:,} of "
            f"{score.questions} | {100 * score.accuracy:.2f}{spread} |"
        )
    if scores.average is not None:
        lines.append(f"| average of four | | | | {100 * scores.average:.2f} |")
    if lines:
        head = "| benchmark | shots | metric | questions | accuracy, % |"
        lines = [head, "|---|---|---|---|---|", *lines]
    if scores.further:
        lines += [""] * bool(lines) + ["| task | metric | value |", "|---|---|---|"]
    for task, metrics in scores.further.items():
        for name, value in metrics.items():
            if "_stderr," not in name:
                error = metrics.get(name.replace(",", "_stderr,", 1))
                text = f"{value:.4g}" + ("" if error is None else f" +- {error:.2g}")
                lines.append(f"| {task} | {name} | {text} |")
    return "\n".join(lines) + "\n"


def _read(kind: type, values: Any, what: str) -> Any:
    """Build a dataclass from an object of exactly its fields, those with defaults aside."""
    if not isinstance(values, dict):
        raise ValueError(f"{what} is {shown(values)}; it must be an object")
    if unknown := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{what} has unknown fields: {listed(unknown)}")
    kinds = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise ValueError(f"{what}.{name} is {shown(value)}, which is of another type")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{what} is not complete: {error}") from None


def _is_fraction(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0.0 <= value <= 1.0


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON can stand in a field of the type ``kind``."""
    kinds = [get_origin(one) or one for one in get_args(kind) or (kind,)]
    if get_origin(kind) is Mapping:
        return isinstance(value, dict)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        return abs(value) <= sys.float_info.max
    # Half characters cannot be written, and tables have a line for each row.
    return type(value) in kinds and (not isinstance(value, str) or value.isprintable())
