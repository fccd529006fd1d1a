"""The table of a comparison: means over seeds as markdown, single runs as CSV."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison_figures import COLUMNS, NEVER, PLACE, Column, Figure, baselines, place
from comparison_runs import BY_STAGE, FAILED, FINISHED, NUMBERS, TEXTS, UNFINISHED, Run

# In the paper's order, then the rest of torch's; others follow by name.
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV",
)  # fmt: skip
# A difference in one of these is told below the table.
SAME = ("device", "n_devices", "torch_version", "config_file", "model", "dataset", "steps")
MISSING = "-"
NO_BASELINE = "no none run"

HEAD = """\
# Comparison

Mean over seeds (min..max). *gain over none* compares with the run of method none of the same
schedule and seed; tokens/s are those of the stable phase, for none of the whole run. *seconds* is
the time spent in training steps. *seconds to none's loss* is the time until the running mean over
{window} logged training losses is as low as none's is at its end.
*points over none* is the difference in average accuracy to the run that the gain compares with.
`-`: not known.
"""


@dataclass(frozen=True)
class Compared:
    """A run, what it is compared with, and its figures by the key of their column."""

    run: Run
    baseline: Run | None
    figures: Mapping[str, Figure]


def compare(runs: Sequence[Run], window: int) -> list[Compared]:
    """Return every run with its figures, in the order of the table; only finished runs have any."""
    compared = [
        Compared(
            run,
            baseline,
            {column.key: column.figure(run, baseline, window) for column in COLUMNS}
            if run.status == FINISHED
            else {},
        )
        for run, baseline in zip(runs, baselines(runs), strict=True)
    ]
    return sorted(compared, key=lambda one: _position(one.run))


def render_table(compared: Sequence[Compared], unreadable: Sequence[str], window: int) -> str:
    """Return the table of means with its notes, as markdown."""
    places = {place(one.run) for one in compared if one.run.status == FINISHED}
    titles = ["schedule", "method", *(["on"] if len(places) > 1 else []), "runs"]
    columns = [c for c in COLUMNS if not c.is_optional or _is_known(c, compared)]
    lines = [
        HEAD.format(window=window),
        _line([*titles, *(column.title for column in columns)]),
        "|" + "---|" * (len(titles) + len(columns)),
    ]
    for group in _groups(compared):
        run = group[0].run
        names = [run.schedule, run.method]
        if len(places) > 1:
            names.append(_place_name(run))
        lines.append(_line([*names, _counts(group), *(cell(group, c) for c in columns)]))
    notes = [f"- {note}" for note in _notes(compared, unreadable)]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def render_csv(compared: Sequence[Compared]) -> str:
    """Return a row of plain values for each run; what is not known is empty."""
    known = {column.key for column in COLUMNS}
    names = ["schedule", "method", "seed", "status", "folder"]
    rest = [key for key in (*NUMBERS, *TEXTS) if key not in known and key not in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(column.key for column in COLUMNS), *rest, *BY_STAGE])
    for one in compared:
        run = one.run
        ratios = [run.summary.get(key) for key in BY_STAGE]
        writer.writerow(
            [run.schedule, run.method, run.seed, run.status, run.folder]
            + [one.figures.get(column.key) for column in COLUMNS]
            + [run.summary.get(key) for key in rest]
            + [None if by_stage is None else json.dumps(by_stage) for by_stage in ratios]
        )
    return text.getvalue()


def cell(group: Sequence[Compared], column: Column) -> str:
    """Return mean and spread of one figure over the runs of a row."""
    finished = [one for one in group if one.run.status == FINISHED]
    if column.needs_baseline and finished and not any(one.baseline for one in finished):
        return NO_BASELINE
    values = [one.figures[column.key] for one in finished]
    never = values.count(NEVER)
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return NEVER if never else MISSING
    text = format(statistics.fmean(numbers), column.form)
    low, high = min(numbers), max(numbers)
    if low != high:
        unsigned = column.form.removeprefix("+")
        text += f" ({low:{unsigned}}..{high:{unsigned}})"
    return f"{text}, {NEVER} in {never} of {len(values)}" if never else text


def _is_known(column: Column, compared: Sequence[Compared]) -> bool:
    """Return whether a run has the figure."""
    return any(one.figures.get(column.key) is not None for one in compared)


def _position(run: Run) -> tuple[Any, ...]:
    """Return what sorts runs: schedules in the paper's order, of each none first."""
    known = run.schedule in SCHEDULES
    return (
        SCHEDULES.index(run.schedule) if known else len(SCHEDULES),
        run.schedule,
        run.method != "none",
        run.method,
        -1 if run.seed is None else run.seed,
        str(run.folder),
    )


def _groups(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Return the runs of each row: one schedule and method, on one place.

    A run that did not end may not know its place; it goes with the first row of its method.
    """
    groups: dict[tuple[Any, ...], list[Compared]] = {}
    for one in sorted(compared, key=lambda one: one.run.status != FINISHED):
        what = (one.run.schedule, one.run.method)
        key = (*what, place(one.run))
        if one.run.status != FINISHED:
            key = next((known for known in groups if known[:2] == what), key)
        groups.setdefault(key, []).append(one)
    return sorted(groups.values(), key=lambda group: _position(group[0].run)[:4])


def _counts(group: Sequence[Compared]) -> str:
    """Return how many runs the means are over, and how many did not end."""
    counts = Counter(one.run.status for one in group)
    others = [f"{counts[status]} {status}" for status in (FAILED, UNFINISHED) if counts[status]]
    return ", ".join([*([str(counts[FINISHED])] if counts[FINISHED] else []), *others])


def _notes(compared: Sequence[Compared], unreadable: Sequence[str]) -> Iterator[str]:
    """Yield what a reader of the table has to know."""
    finished = [one.run for one in compared if one.run.status == FINISHED]
    for key in SAME:
        yield from _difference(key, finished)
    yield from _difference_in_questions(finished)
    without = [
        one.run.label for one in compared if one.run.status == FINISHED and one.baseline is None
    ]
    if without:
        same = ", ".join(PLACE)
        yield f"{NO_BASELINE} of the same schedule, seed, {same}: {', '.join(without)}"
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
        others = [f"{value} in {', '.join(labels[value])}" for value in labels if value != common]
        yield f"{key} differs: {'; '.join(others)}; {common} in all others"


def _difference_in_questions(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line that says which runs were asked what, where not all were asked the same."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        if run.scores is not None:
            labels.setdefault(run.scores.asked, []).append(run.label)
    if len(labels) > 1:
        told = "; ".join(f"{', '.join(names)}: {asked}" for asked, names in labels.items())
        yield f"questions differ, so accuracies cannot be compared: {told}"
    if labels and (without := [run.label for run in runs if run.scores is None]):
        yield f"not evaluated: {', '.join(without)}"


def _place_name(run: Run) -> str:
    if run.status != FINISHED:
        return MISSING
    device, n_devices, model = ("unknown" if value is None else value for value in place(run))
    return f"{n_devices} x {device}, {model}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
