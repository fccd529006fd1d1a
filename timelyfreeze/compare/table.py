"""The table of a comparison: means over seeds, notes for the reader, and single runs as CSV."""

import base64
import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from timelyfreeze.compare.groups import PLACE, Group, group
from timelyfreeze.compare.metrics import COLUMN_OF, COLUMNS, NEVER, Column, Criteria
from timelyfreeze.compare.plots import KINDS, Plot
from timelyfreeze.compare.runs.run import FAILED, FINISHED, NO_PLACE, UNFINISHED, FoundRuns, Run
from timelyfreeze.files import markdown_table, markdown_text, spreadsheet_cell
from timelyfreeze.records.scores import BY_KEY, Scores
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.records.tables import STEPS

# A difference in one of these is told below the table.
SAME = ("device", "n_devices", "torch_version", "config_file", "model", "dataset", "steps")
MISSING = "-"
NO_BASELINE = "no none run"
_MANY_NAMES = 6


@dataclass(frozen=True)
class Table:
    """A table of texts, its notes, and the values before training."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    before: tuple[str, ...] = ()


def tabulate(runs: Sequence[Run], found: FoundRuns, criteria: Criteria) -> Table:
    """Return the table of means over repeats, with its notes; ``runs`` are the compared runs."""
    groups = group(runs)
    finished = [run for run in runs if run.is_finished]
    known = {
        key for run in finished for key, value in run.metrics.items()
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }  # fmt: skip
    units = {f"{run.summary.unit}/s": None for run in finished} or ["tokens/s"]
    columns: dict[str, Callable[[Group], str]] = {
        "schedule": lambda one: one.schedule,
        "method": lambda one: one.method,
    }
    if any(one.variant for one in groups):
        columns["settings"] = lambda one: one.variant or MISSING
    if len({run.place for run in finished}) > 1:
        columns["on"] = lambda one: one.place
    columns["runs"] = _counts
    for column in COLUMNS:
        if column.key in known or not column.is_optional:
            title = column.title.replace("tokens/s", " or ".join(units))
            columns[title] = partial(cell, column=column)
    rows = tuple(tuple(text(one) for text in columns.values()) for one in groups)
    before: dict[str, None] = {}
    for scores in found.base_models:
        accuracies = {} if scores.average is None else {"average accuracy": scores.average}
        accuracies |= {BY_KEY[key].title: one.accuracy for key, one in scores.benchmarks.items()}
        if told := [f"{name} {100 * accuracy:.2f}%" for name, accuracy in accuracies.items()]:
            before[f"Before training, {Path(scores.model).name}: {', '.join(told)}."] = None
    return Table(tuple(columns), rows, tuple(_notes(runs, found, criteria)), tuple(before))


def render_csv(runs: Sequence[Run]) -> str:
    """Return a row of plain values per run; unknown values are empty."""
    own = ["schedule", "method", "seed", "status", "folder"]
    keys = [*own, "settings", *COLUMN_OF]
    told = [one.name for one in fields(RunSummary) if one.name not in keys]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*keys, *told])
    for run in runs:
        values = [getattr(run, key) for key in own]
        values += [run.apart, *(run.metrics.get(key) for key in COLUMN_OF)]
        values += [getattr(run.told, name, None) for name in told]
        writer.writerow(map(_plain, values))
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """Return a value for the CSV file, which has nothing for None."""
    return json.dumps(value) if isinstance(value, dict) else spreadsheet_cell(value)


def cell(group: Group, column: Column) -> str:
    """Return mean and spread of a metric over a line's runs."""
    finished = group.runs
    if column.over_none and finished and not any(one.baseline for one in finished):
        return NO_BASELINE
    never = sum(run.metrics[column.key] == NEVER for run in finished)
    spread = group.spread(column.key)
    if spread is None:
        return NEVER if never else MISSING
    text = format(spread.mean, column.form)
    if spread.low != spread.high:
        unsigned = column.form.removeprefix("+")
        text += f" ({spread.low:{unsigned}}..{spread.high:{unsigned}})"
    return f"{text}, {NEVER} in {never} of {len(finished)}" if never else text


def _counts(group: Group) -> str:
    """Return how many runs the means are over, and how many did not end."""
    counts = Counter(run.status for run in group.members)
    others = [f"{counts[status]} {status}" for status in (FAILED, UNFINISHED) if counts[status]]
    return ", ".join([*([str(counts[FINISHED])] if counts[FINISHED] else []), *others])


def _notes(runs: Sequence[Run], found: FoundRuns, criteria: Criteria) -> Iterator[str]:
    """Yield notes for the reader of the table."""
    finished = [run for run in runs if run.is_finished]
    for key in SAME:
        yield from _difference(key, finished)
    yield from _difference_in_questions(finished, found.base_models)
    if criteria.reference is not None:
        yield from _other_than_reference(criteria.reference, finished)
    without = [run.label for run in finished if run.baseline is None]
    off = [run.label for run in finished
           if run.summary.emulated_ranks is not None and not run.by_virtual_clock]  # fmt: skip
    if off:
        yield (
            f"{STEPS.name} does not have the virtual time of all steps, so seconds are of the "
            f"process that emulates: {_names(off)}"
        )
    if without:
        same = f"schedule, seed, {', '.join(PLACE)} and work in a step"
        yield f"{NO_BASELINE} of the same {same}: {_names(without)}"
    for run in runs:
        if not run.is_finished:
            yield f"{run.status}: {run.label}, in {run.folder}"
        if run.told is not None and run.told.failure:
            yield f"{run.label}: {run.told.failure}"
    yield from (f"not read: {problem}" for problem in found.unreadable)


def _difference(key: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line naming the runs with an unusual ``key``."""

    def value(run: Run) -> str:
        known = getattr(run.summary, key)
        # The same file lies elsewhere on another machine.
        known = Path(known).name if key == "config_file" and known else known
        return "unknown" if known is None else str(known)

    labels = _labels_by(value, runs)
    if len(labels) > 1:
        common = max(labels, key=lambda value: len(labels[value]))
        others = [f"{value} in {_names(labels[value])}" for value in labels if value != common]
        yield f"{key} differs: {'; '.join(others)}; {common} in all others"


def _difference_in_questions(runs: Sequence[Run], base_models: Sequence[Scores]) -> Iterator[str]:
    """Yield a line on runs with different questions."""
    labels = _labels_by(lambda run: run.scores.asked if run.scores else "", runs)
    for scores in base_models:
        labels.setdefault(scores.asked, []).append("the model before training")
    without = labels.pop("", [])
    if len(labels) > 1:
        told = "; ".join(f"{_names(names)}: {asked}" for asked, names in labels.items())
        yield f"questions differ, so accuracies cannot be compared: {told}"
    if labels and without:
        yield f"not evaluated: {_names(without)}"


def _labels_by(value: Callable[[Run], str], runs: Sequence[Run]) -> dict[str, list[str]]:
    labels: dict[str, list[str]] = {}
    for run in runs:
        labels.setdefault(value(run), []).append(run.label)
    return labels


def _other_than_reference(reference: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines on the reference, and on runs not comparable with it."""
    yield f"the reference: {reference.label}, on {reference.place}, in {reference.folder}"
    model = reference.summary.model
    if others := [run.label for run in runs if run.summary.model != model]:
        yield f"of another model than the reference, not held against it: {_names(others)}"
    alike = [run for run in runs if run.summary.model == model]
    if away := [run.label for run in alike if run.place != reference.place]:
        yield f"not on the reference's devices, its loss in their own seconds: {_names(away)}"


def _names(labels: Sequence[str]) -> str:
    """Return ``labels`` as a list, the first ones if there are many."""
    more = len(labels) - _MANY_NAMES
    few = ", ".join(labels[:_MANY_NAMES])
    return ", ".join(labels) if more <= 1 else f"{few} and {more} more"


# Columns in front that hold names.
_TEXTS = frozenset({"schedule", "method", "settings", "on", "runs"})
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
    autoescape=select_autoescape(["html.j2"]),
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_TEMPLATES.filters["markdown"] = markdown_text


def render_html(
    title: str, table: Table, groups: Sequence[Group], plots: Sequence[Plot],
    images: Mapping[str, bytes],
) -> str:  # fmt: skip
    """Return the page as HTML; ``images`` are PNG files by the name of their plot."""
    kinds = [[plot for plot in plots if plot.kind == kind] for kind in KINDS]
    return _TEMPLATES.get_template("page.html.j2").render(
        title=title,
        table=table,
        text_columns=_TEXTS,
        n_runs=sum(len(group.members) for group in groups),
        n_finished=sum(len(group.runs) for group in groups),
        places=list(dict.fromkeys(g.place for g in groups if g.place != NO_PLACE)),
        kinds=[alike for alike in kinds if alike],
        images={name: base64.b64encode(data).decode("ascii") for name, data in images.items()},
    )


def render_markdown(table: Table, criteria: Criteria, plots: Sequence[Plot] = ()) -> str:
    """Return the table with its notes, and the plots with their missing groups, as Markdown."""
    return _TEMPLATES.get_template("page.md.j2").render(
        table=table,
        rows=markdown_table(table.titles, table.rows),
        plots=plots,
        window=criteria.window,
    )
