"""Metrics of each run, some relative to the run without freezing.

Times of an emulated pipeline are virtual.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import partial
from importlib import resources

from timelyfreeze.compare.runs.errors import Statistic, paired_errors
from timelyfreeze.compare.runs.run import Metric, Points, Run
from timelyfreeze.records.scores import AVERAGED, Scores
from timelyfreeze.records.tables import WINDOW, last_running_mean, seconds_to_reach

NEVER = "never"
# Points of accuracy by which means of equal scores may differ.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Criteria:
    """Logged losses in a running mean, and the run whose last loss the others are to reach."""

    window: int = WINDOW
    reference: Run | None = None


@dataclass(frozen=True)
class Column:
    """A metric of a run's row."""

    key: str  # its name in the CSV file
    title: str  # its name in the table of runs whose throughput counts tokens
    form: str  # as in ``format``
    over_none: bool = False  # whether it compares a run with its baseline
    is_optional: bool = False  # the table leaves it out where no run has it


_TOLD = tomllib.loads(resources.files(__package__).joinpath("metrics.toml").read_text())
COLUMNS = tuple(Column(**told) for told in _TOLD["columns"])
COLUMN_OF = {column.key: column for column in COLUMNS}


def row_of(run: Run, none: Run | None, criteria: Criteria) -> dict[str, Metric]:
    """Return the metrics of a finished run by the keys of ``COLUMNS``; ``none`` is its baseline."""
    told, reference = run.summary, criteria.reference
    row: dict[str, Metric] = {column.key: getattr(told, column.key, None) for column in COLUMNS}
    row |= {
        "device_tokens_per_second": told.by_virtual_clock().tokens_per_second,
        "batch_error_percent": _percent_above(told.batch_ms, told.batch_ms_predicted),
        "top1_percent": _points(told.validation_top1, 0.0),
        "seconds": run.seconds,
        **accuracies(run.scores),
        "accuracy_stderr": _average_error(run.scores),
    }
    if reference is not None and reference.summary.model == told.model:
        seconds = _reached(run.losses, reference.losses, criteria.window)
        row["seconds_to_reference_loss"] = seconds
    return row if none is None else row | _over_none(run, none, criteria.window)


def _over_none(run: Run, none: Run, window: int) -> dict[str, Metric]:
    """Return the metrics of a run relative to its baseline."""
    told, nones = run.summary, none.summary
    is_as_long = told.steps == nones.steps
    saved = _percent_above(run.seconds, none.seconds) if is_as_long else None
    # Of accuracies only where both were asked the same.
    scores = [one.scores for one in (run, none) if one.scores]
    is_alike = len(scores) == 2 and scores[0].asked == scores[1].asked
    points = _points(scores[0].average, scores[1].average) if is_alike else None
    speeds = (one.by_virtual_clock().tokens_per_second for one in (told, nones))
    losses = run.losses, none.losses, window
    # Held-out losses where both have two or more.
    validated = run.validation_losses, none.validation_losses
    best = (*validated, 1) if min(map(len, validated)) > 1 else losses

    def to_none(own: Points, others: Points, n: int) -> Metric:
        """Return when the run gets to none's last loss; of another length, at its end alone."""
        return _reached(own if is_as_long else own[-n:], others, n)

    def over_all(seconds: Metric) -> Metric:
        """Return a time over none's total time."""
        if not 0.0 < none.seconds < math.inf:
            return None
        return seconds / none.seconds if isinstance(seconds, float) else seconds

    def to_part(own: Points, nones: Points, part: float = 1.0) -> Metric:
        """Return when the run has come down a part of none's way, over none's total time."""
        end = nones[-1][1]
        target = end + (1.0 - part) * (nones[0][1] - end)
        return over_all(_falls_to(own if is_as_long else own[-1:], target))

    paired: dict[str, Metric] = {}
    if best[2] == 1:
        held_out: dict[str, Statistic] = {
            "time_ratio": to_part,
            **{f"time_ratio_{n}": partial(to_part, part=n / 100) for n in (95, 98)},
            "learned_percent": partial(_learned, window=1),
            "loss_over_none": lambda own, nones: own[-1][1] - nones[-1][1],
        }
        paired |= {name: of(*validated) for name, of in held_out.items()}
        found = paired_errors(run.held_out, none.held_out, held_out) if run is not none else {}
        paired |= {f"{name}_error": error for name, error in found.items()}
    at_end = run.seconds if points is not None and points >= -_ROUNDING else NEVER
    return {
        "gain_percent": _percent_above(*speeds),
        "top1_points": _points(told.validation_top1, nones.validation_top1),
        "time_saved_percent": None if saved is None else -saved,
        "time_ratio": over_all(to_none(*best)),
        "learned_percent": _learned(*best),
        "seconds_to_none_loss": to_none(*losses),
        "accuracy_points": points,
        "accuracy_time_ratio": None if points is None else over_all(at_end),
        **paired,
    }


def _reached(own: Points, others: Points, window: int) -> Metric:
    """Return the time at which the running mean of ``own`` reaches the end of ``others``.

    Means are over ``window`` losses. The time is the last of the first window with a mean not above
    the target: seconds of training, or ``never``; None if losses are too few.
    """
    target = last_running_mean(others, window)
    if target is None or len(own) < window:
        return None
    seconds = seconds_to_reach(own, target, window)
    return NEVER if seconds is None else seconds


def _falls_to(own: Points, target: float) -> Metric:
    """Return when a curve of held-out losses comes down to ``target``, between two of them too."""
    before, above = 0.0, math.nan
    for seconds, loss in own:
        if loss <= target:
            share = (above - target) / (above - loss) if above > target else 1.0
            return before + share * (seconds - before)
        before, above = seconds, loss
    return NEVER


def _learned(own: Points, nones: Points, window: int) -> Metric:
    """Return how far the loss has come down at the end of a run, in percent of none's way."""
    ends = [last_running_mean(losses, window) for losses in (own, nones)]
    if ends[0] is None or ends[1] is None or not (start := nones[0][1]) > ends[1]:
        return None
    return 100 * (start - ends[0]) / (start - ends[1])


def _percent_above(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else 100 * (value / reference - 1)


def _points(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else 100 * (own - other)


def accuracies(scores: Scores | None) -> dict[str, float]:
    """Return accuracies in percent, by the keys of ``COLUMNS``, as far as they are known."""
    if scores is None:
        return {}
    known = {f"accuracy_{key}": score.accuracy for key, score in scores.benchmarks.items()}
    known |= {} if scores.average is None else {"accuracy": scores.average}
    return {key: 100 * share for key, share in known.items()}


def _average_error(scores: Scores | None) -> float | None:
    """Return the standard error of the average accuracy, of questions where none is given."""
    if scores is None or scores.average is None:
        return None
    averaged = [scores.benchmarks[key] for key in AVERAGED]
    variances = [
        score.accuracy * (1 - score.accuracy) / score.n_questions
        if score.stderr is None
        else score.stderr**2
        for score in averaged
    ]
    return 100 * math.sqrt(sum(variances)) / len(averaged)
