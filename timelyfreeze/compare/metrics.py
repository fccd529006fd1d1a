"""What is compared: each run's metrics, some of them relative to the run without freezing.

An emulated pipeline is as fast as its virtual clock says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from timelyfreeze.compare.runs.run import Points, Run
from timelyfreeze.records import AVERAGED, BENCHMARKS, WINDOW, last_running_mean, seconds_to_reach

NEVER = "never"
# Points of accuracy by which means of equal scores may differ.
_ROUNDING = 1e-9

# A number, "never" for a loss or an accuracy that was not reached, or None for what is not known.
Metric = float | str | None


@dataclass(frozen=True)
class Terms:
    """Logged losses in a running mean, and the run whose last loss the others are to reach."""

    window: int = WINDOW
    reference: Run | None = None


@dataclass(frozen=True)
class Column:
    """One metric: ``own`` of a run, ``over_none`` of two, or the summary's field named ``key``."""

    key: str  # its name in the CSV file
    title: str  # its name in the table of runs whose throughput counts tokens
    form: str  # as in ``format``
    own: Callable[[Run, Terms], Metric] | None = None
    over_none: Callable[[Run, Run, Terms], Metric] | None = None
    is_optional: bool = False  # the table leaves it out where no run has it

    def of(self, run: Run, baseline: Run | None, terms: Terms) -> Metric:
        """Return the value of a finished run."""
        if self.over_none is not None:
            return None if baseline is None else self.over_none(run, baseline, terms)
        if self.own is not None:
            return self.own(run, terms)
        told: Metric = getattr(run.summary, self.key, None)
        return told


def _tokens_per_second(run: Run) -> float | None:
    """Return the throughput of a device, of an emulated one where the pipeline is emulated."""
    told = run.summary
    is_real = told.emulated_ranks is None
    return told.tokens_per_second if is_real else told.virtual_tokens_per_second


def _reached(own: Points, others: Points, window: int) -> Metric:
    """Return when the running mean of ``own`` is as low as that of ``others`` at its end.

    Means are over ``window`` losses. The time is that of the last loss of the first window whose
    mean is not above the target: seconds of training, or ``never``; None if losses are too few.
    """
    target = last_running_mean(others, window)
    if target is None or len(own) < window:
        return None
    seconds = seconds_to_reach(own, target, window)
    return NEVER if seconds is None else seconds


def _seconds_to_none(run: Run, none: Run, losses: tuple[Points, Points, int]) -> Metric:
    """Return when a run gets to none's last loss; of another length, at its end alone."""
    own, nones, window = losses
    if run.summary.steps != none.summary.steps:
        own = own[-window:]
    return _reached(own, nones, window)


def _losses_of(run: Run, none: Run, window: int) -> tuple[Points, Points, int]:
    """Return own and none's losses, held-out ones where both have two or more, and the window."""
    validated = run.validation_losses, none.validation_losses
    if min(map(len, validated)) > 1:
        return *validated, 1
    return run.losses, none.losses, window


def _time_ratio(run: Run, none: Run, terms: Terms) -> Metric:
    """Return the time to none's final loss over none's total time."""
    if not 0.0 < none.seconds < math.inf:
        return None
    seconds = _seconds_to_none(run, none, _losses_of(run, none, terms.window))
    return seconds / none.seconds if isinstance(seconds, float) else seconds


def _learned(run: Run, none: Run, terms: Terms) -> Metric:
    """Return how far the loss has come down at the end of a run, in percent of none's way."""
    own, nones, window = _losses_of(run, none, terms.window)
    ends = [last_running_mean(losses, window) for losses in (own, nones)]
    if ends[0] is None or ends[1] is None or not (start := nones[0][1]) > ends[1]:
        return None
    return 100 * (start - ends[0]) / (start - ends[1])


def _top1_over_none(run: Run, none: Run, _: Terms) -> Metric:
    own, other = run.summary.validation_top1, none.summary.validation_top1
    return None if own is None or other is None else 100 * (own - other)


def _time_saved(run: Run, none: Run, _: Terms) -> Metric:
    """Return the part of none's training time that a run of as many steps does without, percent."""
    if run.summary.steps != none.summary.steps:
        return None
    above = _percent_above(run.seconds, none.seconds)
    return None if above is None else -above


def _percent_above(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else 100 * (value / reference - 1)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _seconds_to_reference(run: Run, terms: Terms) -> Metric:
    reference = terms.reference
    if reference is None or run.summary.model != reference.summary.model:
        return None
    return _reached(run.losses, reference.losses, terms.window)


def _accuracy(key: str) -> Callable[[Run, Terms], Metric]:
    """Return what reads the accuracy in one benchmark, in percent."""

    def metric(run: Run, _: Terms) -> Metric:
        score = None if run.scores is None else run.scores.benchmarks.get(key)
        return None if score is None else 100 * score.accuracy

    return metric


def _average_accuracy(run: Run) -> float | None:
    return None if run.scores is None else _percent(run.scores.average)


def _average_error(run: Run, _: Terms) -> Metric:
    """Return the standard error of the average accuracy, of questions where none is given."""
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


def _points_over_none(run: Run, none: Run, _: Terms) -> float | None:
    """Return the difference in average accuracy, where both were asked the same."""
    own, other = _average_accuracy(run), _average_accuracy(none)
    if own is None or other is None:
        return None
    asked = [one.scores and one.scores.asked for one in (run, none)]
    return own - other if asked[0] == asked[1] else None


def _time_to_accuracy(run: Run, none: Run, terms: Terms) -> Metric:
    """Return the total time over none's of a run at least as accurate at its end."""
    points = _points_over_none(run, none, terms)
    if points is None or not 0.0 < none.seconds < math.inf:
        return None
    return run.seconds / none.seconds if points >= -_ROUNDING else NEVER


COLUMNS = (
    Column("device_tokens_per_second", "tokens/s per device", ",.0f",
           lambda run, _: _tokens_per_second(run)),
    Column("mfu_percent", "MFU, %", ".2f", is_optional=True),
    Column("gain_percent", "gain over none, %", "+.1f",
           over_none=lambda run, none, _: _percent_above(
               _tokens_per_second(run), _tokens_per_second(none))),
    Column("batch_ms_predicted", "batch predicted, ms", ",.1f"),
    Column("batch_ms", "measured, ms", ",.1f"),
    Column("batch_error_percent", "error, %", "+.1f",
           lambda run, _: _percent_above(run.summary.batch_ms, run.summary.batch_ms_predicted)),
    Column("average_freeze_ratio", "mean freeze ratio", ".3f"),
    Column("train_loss", "train loss", ".3f"),
    Column("validation_loss", "validation loss", ".3f"),
    Column("top1_percent", "top-1, %", ".2f", lambda run, _: _percent(run.summary.validation_top1),
           is_optional=True),
    Column("top1_points", "top-1 over none, points", "+.2f", over_none=_top1_over_none,
           is_optional=True),
    Column("seconds", "seconds", ",.1f", lambda run, _: run.seconds),
    Column("time_saved_percent", "time saved, % of none's", "+.1f", over_none=_time_saved),
    Column("time_ratio", "time to none's loss over none's", ".3f", over_none=_time_ratio),
    Column("learned_percent", "learned, % of none", ".1f", over_none=_learned),
    Column("seconds_to_none_loss", "seconds to none's loss", ",.1f",
           over_none=lambda run, none, terms: _seconds_to_none(
               run, none, (run.losses, none.losses, terms.window))),
    Column("seconds_to_reference_loss", "seconds to the reference's loss", ",.1f",
           _seconds_to_reference, is_optional=True),
    Column("peak_memory_gib", "peak memory, GiB", ".2f"),
    Column("score_ms_per_step", "scores, ms a step", ".2f"),
    Column("score_memory_mib", "scores, MiB", ".1f"),
    *(
        Column(f"accuracy_{benchmark.key}", f"{benchmark.title}, %", ".2f",
               _accuracy(benchmark.key), is_optional=True)
        for benchmark in BENCHMARKS
    ),
    Column("accuracy", "average accuracy, %", ".2f", lambda run, _: _average_accuracy(run),
           is_optional=True),
    Column("accuracy_stderr", "its standard error", ".2f", _average_error, is_optional=True),
    Column("accuracy_points", "points over none", "+.2f", over_none=_points_over_none,
           is_optional=True),
    Column("accuracy_time_ratio", "time to none's accuracy over none's", ".3f",
           over_none=_time_to_accuracy, is_optional=True),
)  # fmt: skip
COLUMN_OF = {column.key: column for column in COLUMNS}
