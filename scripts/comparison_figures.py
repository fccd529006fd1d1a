"""What is compared: each run's figures, some of them relative to the run without freezing.

A run's baseline is the run of method ``none`` with the same schedule and seed, on the same devices
and with the same model. Of several, the one that was started closest in time counts, because a
machine is not equally fast all day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from comparison_runs import FINISHED, Run
from evaluation_benchmarks import BENCHMARKS

from timelyfreeze.runs.losses import last_running_mean, seconds_to_reach

NEVER = "never"
# Figures of runs that differ in one of these are neither averaged nor set against each other.
PLACE = ("device", "n_devices", "model")

# A number, "never" for a loss that was not reached, or None for what is not known.
Figure = float | str | None


@dataclass(frozen=True)
class Column:
    """One figure of the comparison.

    Attributes:
        key: Its name in the CSV file.
        title: Its name in the table.
        form: Format of a value, as in ``format``.
        figure: Gives the value of a run, from the run, its baseline or None, and the window of the
            running mean in logged losses.
        needs_baseline: Whether it is None wherever there is no baseline.
        is_optional: Whether the table leaves it out where no run has it.
    """

    key: str
    title: str
    form: str
    figure: Callable[[Run, Run | None, int], Figure]
    needs_baseline: bool = False
    is_optional: bool = False


def baselines(runs: Sequence[Run]) -> list[Run | None]:
    """Return each run's baseline, in the order of ``runs``; its own for ``none`` itself."""
    return [_baseline(run, runs) if run.status == FINISHED else None for run in runs]


def place(run: Run) -> tuple[Any, ...]:
    """Return the values of ``PLACE``."""
    return tuple(run.summary.get(key) for key in PLACE)


def seconds_to_loss(run: Run, baseline: Run | None, window: int) -> Figure:
    """Return when ``run`` gets to the loss that ``baseline`` ends with.

    Both losses are running means over ``window`` logged training losses. The time is that of the
    last loss of the first window whose mean is not above the baseline's last.

    Returns:
        Seconds of training, ``never``, or None if either run logged fewer losses than ``window``.
    """
    if baseline is None:
        return None
    target = last_running_mean(baseline.losses, window)
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
    ]
    started = _started(run)
    return min(candidates, key=lambda other: abs(_started(other) - started), default=None)


def _started(run: Run) -> float:
    """Return the start of ``run`` in seconds, 0 if it is not known."""
    text = run.summary.get("started_at")
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _known(key: str) -> Callable[[Run, Run | None, int], Figure]:
    """Return what reads ``key`` from a run's summary."""
    return lambda run, _baseline, _window: run.summary.get(key)


def _percent_above(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    return 100 * (value / reference - 1)


def _gain(run: Run, baseline: Run | None, _window: int) -> Figure:
    if baseline is None:
        return None
    key = "tokens_per_second"
    return _percent_above(run.summary.get(key), baseline.summary.get(key))


def _batch_error(run: Run, _baseline: Run | None, _window: int) -> Figure:
    return _percent_above(run.summary.get("batch_ms"), run.summary.get("batch_ms_predicted"))


def _accuracy(key: str) -> Callable[[Run, Run | None, int], Figure]:
    """Return what reads the accuracy in one benchmark, in percent."""

    def figure(run: Run, _baseline: Run | None, _window: int) -> Figure:
        score = None if run.scores is None else run.scores.benchmarks.get(key)
        return None if score is None else 100 * score.accuracy

    return figure


def _average(run: Run, _baseline: Run | None, _window: int) -> Figure:
    average = None if run.scores is None else run.scores.average
    return None if average is None else 100 * average


def _points_over_none(run: Run, baseline: Run | None, window: int) -> Figure:
    """Return the difference in average accuracy, where both were asked the same."""
    if baseline is None or run.scores is None or baseline.scores is None:
        return None
    if run.scores.asked != baseline.scores.asked:
        return None
    own, other = _average(run, None, window), _average(baseline, None, window)
    if not isinstance(own, float) or not isinstance(other, float):
        return None
    return own - other


COLUMNS = (
    Column("tokens_per_second", "tokens/s per device", ",.0f", _known("tokens_per_second")),
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
        "seconds_to_none_loss", "seconds to none's loss", ",.1f", seconds_to_loss,
        needs_baseline=True,
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
    Column(
        "accuracy_points", "points over none", "+.2f", _points_over_none, needs_baseline=True,
        is_optional=True,
    ),
)  # fmt: skip
