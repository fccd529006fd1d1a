"""The table of a comparison: means over seeds as markdown, single runs as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.compare.groups import Compared, Group, group
from timelyfreeze.compare.metrics import COLUMNS, NEVER, PLACE, Column, Terms, place, place_name
from timelyfreeze.compare.runs import BY_STAGE, FAILED, FINISHED, NUMBERS, TEXTS, UNFINISHED, Run

# A difference in one of these is told below the table.
SAME = ("device", "n_devices", "torch_version", "config_file", "model", "dataset", "steps")
MISSING = "-"
_MANY_NAMES = 6
NO_BASELINE = "no none run"

HEAD = """\
# Comparison

Mean over seeds (min..max). *gain over none* compares with the run of method none of the same
schedule and seed; tokens/s are those of the stable phase, for none of the whole run, and by the
virtual clock where the pipeline is emulated. *seconds* is the time spent in training steps.
*seconds to none's loss* is the time until the running mean over {window} logged training losses is
as low as none's is at its end; *to the reference's loss*, as that of the run named below is.
*points over none* is the difference in average accuracy to the run that the gain compares with.
`-`: not known.
"""


@dataclass(frozen=True)
class Table:
    """A table of texts and what a reader has to know of it."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def tabulate(compared: Sequence[Compared], unreadable: Sequence[str], terms: Terms) -> Table:
    """Return the table of means over repeats, with its notes."""
    groups = group(compared)
    has_places = len({place(one.run) for one in compared if one.run.status == FINISHED}) > 1
    has_variants = any(one.variant for one in groups)
    columns = [c for c in COLUMNS if not c.is_optional or _is_known(c, compared)]
    titles = ["schedule", "method"]
    titles += [*(["settings"] if has_variants else []), *(["on"] if has_places else []), "runs"]
    rows = []
    for one in groups:
        names = [one.schedule, one.method]
        names += [one.variant or MISSING] if has_variants else []
        names += [one.place] if has_places else []
        rows.append((*names, _counts(one), *(cell(one, column) for column in columns)))
    notes = tuple(_notes(compared, unreadable, terms))
    return Table((*titles, *(column.title for column in columns)), tuple(rows), notes)


def render_table(table: Table, terms: Terms) -> str:
    """Return ``table`` with its notes, as markdown."""
    lines = [HEAD.format(window=terms.window), _line(table.titles)]
    lines += ["|" + "---|" * len(table.titles), *map(_line, table.rows)]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def render_csv(compared: Sequence[Compared]) -> str:
    """Return a row of plain values for each run; what is not known is empty."""
    known = {column.key for column in COLUMNS}
    names = ["schedule", "method", "seed", "status", "folder", "settings"]
    rest = [key for key in (*NUMBERS, *TEXTS) if key not in known and key not in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(column.key for column in COLUMNS), *rest, *BY_STAGE])
    for one in compared:
        run = one.run
        ratios = [run.summary.get(key) for key in BY_STAGE]
        writer.writerow(
            [run.schedule, run.method, run.seed, run.status, run.folder, one.variant]
            + [one.metrics.get(column.key) for column in COLUMNS]
            + [run.summary.get(key) for key in rest]
            + [None if by_stage is None else json.dumps(by_stage) for by_stage in ratios]
        )
    return text.getvalue()


def cell(group: Group, column: Column) -> str:
    """Return mean and spread of one metric over the runs of a row."""
    finished = group.finished
    if column.needs_baseline and finished and not any(one.baseline for one in finished):
        return NO_BASELINE
    never = [one.metrics[column.key] for one in finished].count(NEVER)
    spread = group.spread(column.key)
    if spread is None:
        return NEVER if never else MISSING
    text = format(spread.mean, column.form)
    if spread.low != spread.high:
        unsigned = column.form.removeprefix("+")
        text += f" ({spread.low:{unsigned}}..{spread.high:{unsigned}})"
    return f"{text}, {NEVER} in {never} of {len(finished)}" if never else text


def _is_known(column: Column, compared: Sequence[Compared]) -> bool:
    """Return whether a run has the metric."""
    return any(one.metrics.get(column.key) is not None for one in compared)


def _counts(group: Group) -> str:
    """Return how many runs the means are over, and how many did not end."""
    counts = Counter(one.run.status for one in group.members)
    others = [f"{counts[status]} {status}" for status in (FAILED, UNFINISHED) if counts[status]]
    return ", ".join([*([str(counts[FINISHED])] if counts[FINISHED] else []), *others])


def _notes(compared: Sequence[Compared], unreadable: Sequence[str], terms: Terms) -> Iterator[str]:
    """Yield what a reader of the table has to know."""
    finished = [one.run for one in compared if one.run.status == FINISHED]
    for key in SAME:
        yield from _difference(key, finished)
    yield from _difference_in_questions(finished)
    if terms.reference is not None:
        yield from _other_than_reference(terms.reference, finished)
    without = [
        one.run.label for one in compared if one.run.status == FINISHED and one.baseline is None
    ]
    if without:
        same = f"schedule, seed, {', '.join(PLACE)} and work in a step"
        yield f"{NO_BASELINE} of the same {same}: {_names(without)}"
    for one in compared:
        if one.run.status != FINISHED:
            yield f"{one.run.status}: {one.run.label}, in {one.run.folder}"
        if one.run.summary.get("failure"):
            yield f"{one.run.label}: {one.run.summary['failure']}"
    for problem in unreadable:
        yield f"not read: {problem}"


def _difference(key: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line that says which runs differ from most others in ``key``."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        value = run.summary.get(key)
        if key == "config_file" and value:
            # The same file lies elsewhere on another machine.
            value = Path(value).name
        labels.setdefault("unknown" if value is None else str(value), []).append(run.label)
    if len(labels) > 1:
        common = max(labels, key=lambda value: len(labels[value]))
        others = [f"{value} in {_names(labels[value])}" for value in labels if value != common]
        yield f"{key} differs: {'; '.join(others)}; {common} in all others"


def _difference_in_questions(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line that says which runs were asked what, where not all were asked the same."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        if run.scores is not None:
            labels.setdefault(run.scores.asked, []).append(run.label)
    if len(labels) > 1:
        told = "; ".join(f"{_names(names)}: {asked}" for asked, names in labels.items())
        yield f"questions differ, so accuracies cannot be compared: {told}"
    if labels and (without := [run.label for run in runs if run.scores is None]):
        yield f"not evaluated: {_names(without)}"


def _other_than_reference(reference: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Yield lines that say what the reference is, and which runs cannot be compared with it."""
    yield f"the reference: {reference.label}, on {place_name(reference)}, in {reference.folder}"
    model = reference.summary.get("model")
    others = [run.label for run in runs if run.summary.get("model") != model]
    if others:
        yield f"of another model than the reference, not held against it: {_names(others)}"
    away = [run.label for run in runs if run.label not in others and place(run) != place(reference)]
    if away:
        yield f"not on the reference's devices, its loss in their own seconds: {_names(away)}"


def _names(labels: Sequence[str]) -> str:
    """Return ``labels`` as a list, the first ones if there are many."""
    more = len(labels) - _MANY_NAMES
    if more <= 1:
        return ", ".join(labels)
    return f"{', '.join(labels[:_MANY_NAMES])} and {more} more"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
