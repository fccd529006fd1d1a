"""Predicted and measured times of runs, and how far they are apart: markdown and CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr
from typing import Any

from timelyfreeze.compare.groups import schedule_rank
from timelyfreeze.compare.runs import FINISHED, SETTINGS, FoundRuns, Run
from timelyfreeze.files import field_of, markdown_table, number_of, read_object

MISSING = "-"


@dataclass(frozen=True)
class Times:
    """A time as it was predicted and as it was measured, milliseconds; None where not known."""

    predicted_ms: float | None
    measured_ms: float | None

    @property
    def error(self) -> float | None:
        """By how much the measured time is above the predicted one, as a fraction of it."""
        if not self.predicted_ms or self.measured_ms is None:
            return None
        return self.measured_ms / self.predicted_ms - 1.0


@dataclass(frozen=True)
class Metrics:
    """What one run says of its predictions.

    Attributes:
        pipeline: ``emulated`` or ``real``, and the number of ranks.
        schedule: Its name.
        max_freeze_ratio: The cap of its plan.
        folder: Where the run is.
        times: By name of ``WHAT``.
        gain: Gain in throughput of the step, as planned, and as measured.
        failure: Why there is no plan.
    """

    pipeline: str
    schedule: str
    max_freeze_ratio: float
    folder: Path
    times: Mapping[str, Times]
    gain: Times
    failure: str | None = None

    @property
    def setting(self) -> tuple[str, str, float]:
        """What repeats of a run fraction."""
        return self.pipeline, self.schedule, self.max_freeze_ratio


WHAT = {
    "batch_unfrozen": "batch without freezing",
    "batch": "batch with",
    "step_unfrozen": "step without freezing",
    "step": "step with",
}


def metrics_of(run: Run) -> Metrics:
    """Return the metrics of a finished run, with its settings from beside its summary.

    An emulated pipeline is measured by its virtual clock.

    Raises:
        OSError: If there are no settings.
        ValueError: If summary or settings lack what is needed.
    """
    settings = read_object(run.folder / SETTINGS)
    try:
        freezing = field_of("", settings, "freezing")
        parallelism = field_of("", settings, "parallelism")
        given = field_of("freezing", freezing, "max_freeze_ratio")
        ranks = field_of("parallelism", parallelism, "pipeline_parallel_degree")
        if isinstance(given, list):
            raise ValueError(f"max_freeze_ratio is {repr(given)}; the table has one for all stages")
        cap = number_of("max_freeze_ratio", given)
        number_of("pipeline_parallel_degree", ranks)
    except ValueError as error:
        raise ValueError(f"{SETTINGS}: {error}") from None
    summary = run.summary
    is_emulated = summary.emulated_ranks is not None
    step_ms_unfrozen, step_ms = summary.step_ms_unfrozen, summary.step_ms
    if is_emulated:
        step_ms_unfrozen, step_ms = summary.virtual_step_ms_unfrozen, summary.virtual_step_ms
    outside_ms, n_batches = summary.outside_ms, summary.batches_per_step

    def step_of(batch_ms: float | None) -> float | None:
        known = batch_ms is not None and outside_ms is not None
        return n_batches * batch_ms + outside_ms if known else None

    unfrozen_ms, planned_ms = summary.batch_ms_unfrozen_predicted, summary.batch_ms_predicted
    times = {
        "batch_unfrozen": Times(unfrozen_ms, summary.batch_ms_unfrozen),
        "batch": Times(planned_ms, summary.batch_ms),
        "step_unfrozen": Times(step_of(unfrozen_ms), step_ms_unfrozen),
        "step": Times(summary.step_ms_predicted, step_ms),
    }
    before, after = times["step_unfrozen"], times["step"]
    return Metrics(
        pipeline=f"{'emulated' if is_emulated else 'real'}, {ranks} ranks",
        schedule=run.schedule,
        max_freeze_ratio=cap,
        folder=run.folder,
        times=times,
        gain=Times(
            _gain(before.predicted_ms, after.predicted_ms),
            _gain(before.measured_ms, after.measured_ms),
        ),
        failure=summary.failure,
    )


def _gain(before_ms: float | None, after_ms: float | None) -> float | None:
    return None if before_ms is None or not after_ms else before_ms / after_ms - 1.0


def collect(found: FoundRuns) -> tuple[list[Metrics], list[str]]:
    """Return the metrics of all finished runs, in the order of the table, and what is amiss."""
    metrics, problems = [], [f"not read: {problem}" for problem in found.unreadable]
    for run in found.runs:
        if run.status != FINISHED:
            problems.append(f"{run.status}: {run.folder}")
            continue
        try:
            one = metrics_of(run)
        except (OSError, ValueError) as error:
            problems.append(f"not read: {run.folder}: {error}")
            continue
        if one.failure is not None:
            problems.append(f"no plan: {run.folder}: {one.failure}")
        metrics.append(one)
    return sorted(metrics, key=_position), problems


def _position(one: Metrics) -> tuple[Any, ...]:
    place = schedule_rank(one.schedule)
    return one.pipeline, place, one.max_freeze_ratio, str(one.folder)


def render_table(metrics: Sequence[Metrics], problems: Iterable[str], head: str) -> str:
    """Return the tables as markdown: one row for each setting, then median and worst errors.

    Where a setting was run several times, a cell holds the median and the smallest and largest.
    """
    titles = ["pipeline", "schedule", "r_max", "runs"]
    for title in WHAT.values():
        titles += [f"{title}, ms: predicted", "measured", "error"]
    rows = []
    for (pipeline, schedule, cap), group in _by_setting(metrics).items():
        cells = [pipeline, schedule, f"{cap:g}", str(len(group))]
        for name in WHAT:
            times = [one.times[name] for one in group]
            cells += [
                _spread([t.predicted_ms for t in times], _ms),
                _spread([t.measured_ms for t in times], _ms),
                _spread([t.error for t in times], _percent),
            ]
        cells.append(_spread([one.gain.predicted_ms for one in group], _percent))
        cells.append(_spread([one.gain.measured_ms for one in group], _percent))
        rows.append(cells)
    table = markdown_table([*titles, "gain predicted", "measured"], rows)
    header = ["pipeline", "what", "runs", "median", "worst", "worst in", "within 3%"]
    lines = [head.rstrip(), "", table, "", "Errors without their sign, over all runs:", ""]
    lines.append(markdown_table(header, list(_errors(metrics))))
    lines += [f"\n- {problem}" for problem in problems]
    return "\n".join(lines) + "\n"


def _by_setting(metrics: Iterable[Metrics]) -> dict[tuple[str, str, float], list[Metrics]]:
    groups: dict[tuple[str, str, float], list[Metrics]] = {}
    for one in metrics:
        groups.setdefault(one.setting, []).append(one)
    return groups


def _errors(metrics: Sequence[Metrics]) -> Iterator[list[str]]:
    for pipeline in dict.fromkeys(one.pipeline for one in metrics):
        mine = [one for one in metrics if one.pipeline == pipeline]
        for name, title in WHAT.items():
            errors = [(one.times[name].error, one) for one in mine]
            known = [(error, one) for error, one in errors if error is not None]
            if not known:
                continue
            worst, where = max(known, key=lambda pair: abs(pair[0]))
            within = sum(abs(error) <= 0.03 for error, _ in known)
            yield [
                pipeline,
                title,
                str(len(known)),
                f"{statistics.median(abs(error) for error, _ in known):.1%}",
                _percent(worst),
                f"{where.schedule}, r_max {where.max_freeze_ratio:g}",
                f"{within} of {len(known)}",
            ]


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    middle = text(statistics.median(known))
    return middle if len(known) == 1 else f"{middle} ({text(min(known))}..{text(max(known))})"


def _ms(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{value:+.1%}"


def render_csv(metrics: Sequence[Metrics]) -> str:
    """Return every run as a row of CSV; what is not known is empty."""
    buffer = io.StringIO()
    columns = ["pipeline", "schedule", "max_freeze_ratio"]
    for name in WHAT:
        columns += [f"{name}_ms_predicted", f"{name}_ms_measured", f"{name}_error"]
    columns += ["step_gain_predicted", "step_gain_measured", "folder"]
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for one in metrics:
        row: list[Any] = [one.pipeline, one.schedule, one.max_freeze_ratio]
        for name in WHAT:
            times = one.times[name]
            row += [times.predicted_ms, times.measured_ms, times.error]
        writer.writerow([*row, one.gain.predicted_ms, one.gain.measured_ms, one.folder])
    return buffer.getvalue()
