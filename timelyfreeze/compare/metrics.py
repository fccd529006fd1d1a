"""What is compared: each run's metrics, some of them relative to the run without freezing.

A run's baseline is the run of method ``none`` with the same schedule and seed, on the same devices,
with the same model and as much work in a step. Of several, the one that was started closest in time
counts, because a machine is not equally fast all day.

An emulated pipeline is as fast as its virtual clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from timelyfreeze.compare.runs import FINISHED, Run
from timelyfreeze.compare.settings import work_differs
from timelyfreeze.records import AVERAGED, BENCHMARKS, WINDOW, last_running_mean, seconds_to_reach

NEVER = "never"
# Metrics of runs that differ in one of these are neither averaged nor set against each other.
PLACE = ("device", "n_devices", "model", "emulated_ranks")

# A number, "never" for a loss that was not reached, or None for what is not known.
Metric = float | str | None


@dataclass(frozen=True)
class Terms:
    """What a comparison was asked for.

    Attributes:
        window: Logged losses in a running mean.
        reference: The run whose last loss is to be reached, None if there is none.
    """

    window: int = WINDOW
    reference: Run | None = None


@dataclass(frozen=True)
class Column:
    """One metric of the comparison.

    Attributes:
        key: Its name in the CSV file.
        title: Its name in the table.
        form: Format of a value, as in ``format``.
        metric: Gives the value of a run, from the run, its baseline or None, and the terms.
        needs_baseline: Whether it is None wherever there is no baseline.
        is_optional: Whether the table leaves it out where no run has it.
    """

    key: str
    title: str
    form: str
    metric: Callable[[Run, Run | None, Terms], Metric]
    needs_baseline: bool = False
    is_optional: bool = False


def baselines(runs: Sequence[Run]) -> list[Run | None]:
    """Return each run's baseline, in the order of ``runs``; its own for ``none`` itself."""
    return [_baseline(run, runs) if run.status == FINISHED else None for run in runs]


def place(run: Run) -> tuple[Any, ...]:
    """Return the values of ``PLACE``."""
    return tuple(run.summary.get(key) for key in PLACE)


def place_name(run: Run) -> str:
    """Return the values of ``PLACE`` as a reader would put them."""
    device, n_devices, model, ranks = (
        "unknown" if value is None and key != "emulated_ranks" else value
        for key, value in zip(PLACE, place(run), strict=True)
    )
    emulated = "" if ranks is None else f"{ranks} emulated ranks on "
    return f"{emulated}{n_devices} x {device}, {model}"


def tokens_per_second(run: Run) -> float | None:
    """Return the throughput of a device, of an emulated one where the pipeline is emulated."""
    virtual = "" if run.summary.get("emulated_ranks") is None else "virtual_"
    return run.summary.get(f"{virtual}tokens_per_second")


def seconds_to_loss(run: Run, other: Run | None, window: int) -> Metric:
    """Return when ``run`` gets to the loss that ``other`` ends with.

    Both losses are running means over ``window`` logged training losses. The time is that of the
    last loss of the first window whose mean is not above the other's last.

    Returns:
        Seconds of training, ``never``, or None if either run logged fewer losses than ``window``.
    """
    target = None if other is None else last_running_mean(other.losses, window)
    if target is None or len(run.losses) < window:
        return None
    seconds = seconds_to_reach(run.losses, target, window)
    return NEVER if seconds is None else seconds


def _baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    if run.method == "none":
        return run
    candidates = [
        other
        for other in runs
        if other.method == "none"
        and other.status == FINISHED
        and (other.schedule, other.seed, place(other)) == (run.schedule, run.seed, place(run))
        and not work_differs(other.settings, run.settings)
    ]
    started = _started(run)
    return min(candidates, key=lambda other: abs(_started(other) - started), default=None)


def _started(run: Run) -> float:
    """Return the start of ``run`` in seconds, 0 if it is not known."""
    text = run.summary.get("started_at")
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _known(key: str) -> Callable[[Run, Run | None, Terms], Metric]:
    """Return what reads ``key`` from a run's summary."""
    return lambda run, _baseline, _terms: run.summary.get(key)


def _percent_above(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    return 100 * (value / reference - 1)


def _speed(run: Run, _baseline: Run | None, _terms: Terms) -> Metric:
    return tokens_per_second(run)


def _gain(run: Run, baseline: Run | None, _terms: Terms) -> Metric:
    if baseline is None:
        return None
    return _percent_above(tokens_per_second(run), tokens_per_second(baseline))


def _seconds_to_none(run: Run, baseline: Run | None, terms: Terms) -> Metric:
    return seconds_to_loss(run, baseline, terms.window)


def _seconds_to_reference(run: Run, _baseline: Run | None, terms: Terms) -> Metric:
    reference = terms.reference
    if reference is None or run.summary.get("model") != reference.summary.get("model"):
        return None
    return seconds_to_loss(run, reference, terms.window)


def _batch_error(run: Run, _baseline: Run | None, _terms: Terms) -> Metric:
    return _percent_above(run.summary.get("batch_ms"), run.summary.get("batch_ms_predicted"))


def _accuracy(key: str) -> Callable[[Run, Run | None, Terms], Metric]:
    """Return what reads the accuracy in one benchmark, in percent."""

    def metric(run: Run, _baseline: Run | None, _terms: Terms) -> Metric:
        score = None if run.scores is None else run.scores.benchmarks.get(key)
        return None if score is None else 100 * score.accuracy

    return metric


def _average(run: Run, _baseline: Run | None, _terms: Terms) -> Metric:
    average = None if run.scores is None else run.scores.average
    return None if average is None else 100 * average


def _average_error(run: Run, _baseline: Run | None, _terms: Terms) -> Metric:
    """Return the standard error of the average accuracy over the questions, in points.

    Where lm-eval gives none for a benchmark, as for a group of tasks of which few questions were
    asked, it is that of independent questions.
    """
    if run.scores is None or run.scores.average is None:
        return None
    scores = [run.scores.benchmarks[key] for key in AVERAGED]
    variances = [
        score.accuracy * (1 - score.accuracy) / score.n_questions
        if score.stderr is None
        else score.stderr**2
        for score in scores
    ]
    return 100 * math.sqrt(sum(variances)) / len(scores)


def _points_over_none(run: Run, baseline: Run | None, terms: Terms) -> Metric:
    """Return the difference in average accuracy, where both were asked the same."""
    if baseline is None or run.scores is None or baseline.scores is None:
        return None
    if run.scores.asked != baseline.scores.asked:
        return None
    own, other = _average(run, None, terms), _average(baseline, None, terms)
    if not isinstance(own, float) or not isinstance(other, float):
        return None
    return own - other


COLUMNS = (
    Column("device_tokens_per_second", "tokens/s per device", ",.0f", _speed),
    Column("gain_percent", "gain over none, %", "+.1f", _gain, needs_baseline=True),
    Column(
        "batch_ms_predicted", "batch predicted, ms", ",.1f", _known("batch_ms_predicted")
    ),
    Column("batch_ms", "measured, ms", ",.1f", _known("batch_ms")),
    Column("batch_error_percent", "error, %", "+.1f", _batch_error),
    Column(
        "average_freeze_ratio", "mean freeze ratio", ".3f", _known("average_freeze_ratio")
    ),
    Column("train_loss", "train loss", ".3f", _known("train_loss")),
    Column("validation_loss", "validation loss", ".3f", _known("validation_loss")),
    Column("seconds", "seconds", ",.1f", _known("seconds")),
    Column(
        "seconds_to_none_loss", "seconds to none's loss", ",.1f", _seconds_to_none,
        needs_baseline=True,
    ),
    Column(
        "seconds_to_reference_loss", "seconds to the reference's loss", ",.1f",
        _seconds_to_reference, is_optional=True,
    ),
    Column("peak_memory_gib", "peak memory, GiB", ".2f", _known("peak_memory_gib")),
    Column("score_ms_per_step", "scores, ms a step", ".2f", _known("score_ms_per_step")),
    Column("score_memory_mib", "scores, MiB", ".1f", _known("score_memory_mib")),
    *(
        Column(f"accuracy_{benchmark.key}", f"{benchmark.title}, %", ".2f",
               _accuracy(benchmark.key), is_optional=True)
        for benchmark in BENCHMARKS
    ),
    Column("accuracy", "average accuracy, %", ".2f", _average, is_optional=True),
    Column("accuracy_stderr", "its standard error", ".2f", _average_error, is_optional=True),
    Column(
        "accuracy_points", "points over none", "+.2f", _points_over_none, needs_baseline=True,
        is_optional=True,
    ),
)  # fmt: skip
