"""Predicted and measured times of runs, and how far they are apart: markdown and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import pandas as pd

from timelyfreeze.compare.groups import schedule_rank
from timelyfreeze.compare.runs.jobs import DEGREE
from timelyfreeze.compare.runs.run import FINISHED, SETTINGS, FoundRuns, Run
from timelyfreeze.files import Count, Within, markdown_table, read_as, shown

CAP = "freezing.max_freeze_ratio"
SETTING = ["pipeline", "schedule", "max_freeze_ratio"]
WHAT = {
    "batch_unfrozen": "batch without freezing",
    "batch": "batch with",
    "step_unfrozen": "step without freezing",
    "step": "step with",
}
NUMBERS = [f"{name}_{part}" for name in WHAT for part in ("ms_predicted", "ms_measured", "error")]
NUMBERS += ["step_gain_predicted", "step_gain_measured"]
# Of the batch with freezing: what 9 of 10 lie within, and whether this one does (1 or 0).
INTERVAL = ["interval_factor", "in_interval"]
COLUMNS = [*SETTING, *NUMBERS, *INTERVAL, "folder", "failure"]


def excess(value: float | None, base: float | None) -> float | None:
    """Return by how much ``value`` is above ``base``, as a fraction; None if it is not known."""
    return None if value is None or not base else value / base - 1.0


def metrics_of(run: Run) -> dict[str, Any]:
    """Return what a finished run says of its predictions, with its settings from beside it.

    An emulated pipeline is measured by its virtual clock. The keys are those of ``COLUMNS``; a
    number that is not known is None.

    Raises:
        ValueError: If summary or settings lack what is needed.
    """
    cap, ranks = _settings_of(run)
    summary = run.summary
    is_emulated = summary.emulated_ranks is not None
    steps_ms = summary.step_ms_unfrozen, summary.step_ms
    if is_emulated:
        steps_ms = summary.virtual_step_ms_unfrozen, summary.virtual_step_ms
    outside_ms, unfrozen_ms = summary.outside_ms, summary.batch_ms_unfrozen_predicted
    known = unfrozen_ms is not None and outside_ms is not None
    predicted_ms = summary.batches_per_step * unfrozen_ms + outside_ms if known else None
    pairs = {
        "batch_unfrozen": (unfrozen_ms, summary.batch_ms_unfrozen),
        "batch": (summary.batch_ms_predicted, summary.batch_ms),
        "step_unfrozen": (predicted_ms, steps_ms[0]),
        "step": (summary.step_ms_predicted, steps_ms[1]),
    }
    metrics: dict[str, Any] = {
        "pipeline": f"{'emulated' if is_emulated else 'real'}, {ranks} ranks",
        "schedule": run.schedule,
        "max_freeze_ratio": cap,
    }
    for name, (predicted_ms, measured_ms) in pairs.items():
        metrics[f"{name}_ms_predicted"] = predicted_ms
        metrics[f"{name}_ms_measured"] = measured_ms
        metrics[f"{name}_error"] = excess(measured_ms, predicted_ms)
    for i, part in enumerate(("predicted", "measured")):
        metrics[f"step_gain_{part}"] = excess(pairs["step_unfrozen"][i], pairs["step"][i])
    factor, error = summary.interval_factor, metrics["batch_error"]
    known = factor is not None and error is not None
    metrics["interval_factor"] = factor
    metrics["in_interval"] = (
        None if factor is None or error is None else 1.0 / factor <= 1.0 + error <= factor
    )
    return metrics | {"folder": str(run.folder), "failure": summary.failure}


def _settings_of(run: Run) -> tuple[float, int]:
    """Return the cap of a run and its pipeline ranks."""
    try:
        cap = run.settings.get(CAP)
        if isinstance(cap, list):
            raise ValueError(f"{CAP} is {shown(cap)}; the table has one for all stages")
        degree = read_as(Count, run.settings.get(DEGREE), DEGREE)
        return read_as(Annotated[float, Within(-math.inf)], cap, CAP), degree
    except ValueError as error:
        raise ValueError(f"{SETTINGS}: {error}") from None


def collect(found: FoundRuns) -> tuple[pd.DataFrame, list[str]]:
    """Return a row of ``COLUMNS`` for each finished run, in order, and what is amiss."""
    rows, problems = [], [f"not read: {problem}" for problem in found.unreadable]
    for run in found.runs:
        if run.status != FINISHED:
            problems.append(f"{run.status}: {run.folder}")
            continue
        try:
            rows.append(metrics_of(run))
        except ValueError as error:
            problems.append(f"not read: {run.folder}: {error}")
            continue
        if rows[-1]["failure"] is not None:
            problems.append(f"no plan: {run.folder}: {rows[-1]['failure']}")
    runs = pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys([*NUMBERS, *INTERVAL], float))
    return runs.sort_values([*SETTING, "folder"], key=_sort_key, ignore_index=True), problems


def _sort_key(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.map(schedule_rank) if column.name == "schedule" else column


def render_table(runs: pd.DataFrame, problems: Iterable[str], head: str) -> str:
    """Return the tables as markdown: one row for each setting, then median and worst errors.

    Where a setting was run several times, a cell holds the median and the smallest and largest.
    """
    titles = ["pipeline", "schedule", "r_max", "runs"]
    for title in WHAT.values():
        titles += [f"{title}, ms: predicted", "measured", "error"]
    titles += ["gain predicted", "measured", "batch with in its interval"]
    settings = [
        [
            *(pipeline, schedule, f"{cap:g}", str(len(group))),
            *(_spread(group[n]) for n in NUMBERS),
            _share(group["in_interval"]),
        ]
        for (pipeline, schedule, cap), group in runs.groupby(SETTING, sort=False)
    ]
    names = ["pipeline", "what", "runs", "median", "worst", "worst in", "within 3%"]
    names.append("in the stated interval")
    lines = [head.rstrip(), "", markdown_table(titles, settings)]
    lines += ["", "Errors without their sign, over all runs:", ""]
    lines.append(markdown_table(names, _errors(runs)))
    lines += [f"\n- {problem}" for problem in problems]
    return "\n".join(lines) + "\n"


def _errors(runs: pd.DataFrame) -> list[list[str]]:
    rows = []
    for pipeline, mine in runs.groupby("pipeline", sort=False):
        for name, title in WHAT.items():
            errors = mine[f"{name}_error"].dropna()
            if not errors.empty:
                worst = mine.loc[errors.abs().idxmax()]
                where = f"{worst['schedule']}, r_max {worst['max_freeze_ratio']:g}"
                inside = _share(mine["in_interval"]) if name == "batch" else "-"
                rows.append([pipeline, title, *error_cells(errors, where), inside])
    return rows


def error_cells(errors: pd.Series[float], where: str | None = None) -> list[str]:
    """Return how many errors there are, their median, the worst, and how many are small."""
    sizes = errors.abs()
    cells = [str(len(errors)), f"{sizes.median():.1%}", f"{errors[sizes.idxmax()]:+.1%}"]
    return [*cells, *([where] if where else []), f"{(sizes <= 0.03).sum()} of {len(errors)}"]


def _share(column: pd.Series[float]) -> str:
    known = column.dropna()
    return "-" if known.empty else f"{known.sum():.0f} of {len(known)}"


def _spread(column: pd.Series[float]) -> str:
    known = column.dropna()
    if known.empty:
        return "-"
    text: Callable[[float], str] = ("{:.1f}" if "_ms_" in str(column.name) else "{:+.1%}").format
    middle = text(known.median())
    return middle if len(known) == 1 else f"{middle} ({text(known.min())}..{text(known.max())})"


def render_csv(runs: pd.DataFrame) -> str:
    """Return every run as a row of CSV; what is not known is empty."""
    return runs.drop(columns="failure").to_csv(index=False, lineterminator="\n")
