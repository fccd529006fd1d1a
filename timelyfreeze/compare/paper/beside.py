"""What runs gave beside what the paper gives: its tables of accuracy, speed and scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.metrics import COLUMNS
from timelyfreeze.compare.paper.measured import BASE, Values, measured
from timelyfreeze.compare.paper.studies import Study
from timelyfreeze.files import markdown_table
from timelyfreeze.records import BENCHMARKS, Scores

_UNKNOWN = "-"
_FORMS = {column.key: column.form for column in COLUMNS}
_TITLES = {column.key: column.title for column in COLUMNS}


def runs_beside(
    study: Study, groups: Sequence[Group], base: Scores | None, columns: Sequence[str]
) -> str:
    """Return the table of a study: of each metric ours, the paper's, and the difference.

    Ours are means over seeds. Where ours was not measured, only the paper's stands there.

    Args:
        study: What was run.
        groups: What came out, from ``compare.groups.group``.
        base: Scores of the model before training; None if it was not scored.
        columns: Keys of the metrics.
    """
    found = {(one.schedule, one.method): one for one in groups}
    rows = []
    if "accuracy" in columns:
        before = {} if base is None else _accuracies(base)
        rows.append(["", "before training", *_cells(before, (study.model, "", BASE), columns)])
    for schedule in study.schedules:
        for method in study.methods:
            ours = _means(found.get((schedule, method)), columns)
            cells = _cells(ours, (study.model, schedule, method), columns)
            rows.append([schedule, method, *cells])
    return markdown_table(["schedule", "method", *_heads(columns)], rows)


def _heads(columns: Sequence[str]) -> Iterator[str]:
    for key in columns:
        yield from (f"{_TITLES[key]}: ours", "paper", "difference")


def _means(group: Group | None, columns: Sequence[str]) -> dict[str, float]:
    if group is None:
        return {}
    spreads = {key: group.spread(key) for key in columns}
    return {key: spread.mean for key, spread in spreads.items() if spread is not None}


def _accuracies(scores: Scores) -> dict[str, float]:
    """Return percents under the keys of a comparison's columns."""
    found = {
        f"accuracy_{one.key}": 100.0 * scores.benchmarks[one.key].accuracy
        for one in BENCHMARKS
        if one.key in scores.benchmarks
    }
    average = scores.average
    return found if average is None else {**found, "accuracy": 100.0 * average}


def _cells(ours: Values, names: tuple[str, str, str], columns: Sequence[str]) -> Iterator[str]:
    papers = measured()[names]
    for key in columns:
        form, pair = _FORMS[key], (ours.get(key), papers.get(key))
        yield from (_UNKNOWN if value is None else format(value, form) for value in pair)
        if None in pair:
            yield _UNKNOWN
        else:
            yield format(ours[key] - papers[key], f"+{form.removeprefix('+')}")
