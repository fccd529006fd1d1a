"""Batch times, from all ranks' parts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.schedule import Action, PipelineDag, start_times
from timelyfreeze.settings import Phase
from timelyfreeze.timing.monitoring import median_of_each

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class RankBatches:
    """A rank's batches since the last collection."""

    # phase (its value) and span in milliseconds of each batch, oldest first; the same phases on
    # every rank
    batches: tuple[tuple[str, float], ...]
    # median time of each of the rank's actions over these batches, milliseconds
    durations_ms: dict[Action, float]


def misreading(durations_ms: Mapping[Action, float], span_ms: float) -> str | None:
    """Return an impossible reading of a clock in a rank's batch; None if all is possible."""
    for what, time_ms in (*durations_ms.items(), ("a batch", span_ms)):
        if not (math.isfinite(time_ms) and time_ms >= 0.0):
            return f"{what} took {time_ms:g} ms"
    return None


def rank_batches(batches: Sequence[tuple[Phase, Mapping[Action, float], float]]) -> RankBatches:
    """Return a rank's batches for the other ranks: nothing after a clock's misreading.

    All are left out then, since ranks' batches are matched by their number.
    """
    if any(misreading(durations_ms, span_ms) is not None for _, durations_ms, span_ms in batches):
        return RankBatches((), {})
    return RankBatches(
        tuple((phase.value, span_ms) for phase, _, span_ms in batches),
        median_of_each([durations_ms for _, durations_ms, _ in batches]),
    )


def slowest(processes: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Merge times of several processes; the slowest replica counts, milliseconds."""
    merged: dict[_Key, float] = {}
    for times_ms in processes:
        for key, time_ms in times_ms.items():
            merged[key] = max(time_ms, merged.get(key, 0.0))
    return merged


def slowest_durations(ranks: Sequence[RankBatches]) -> dict[Action, float]:
    """Merge the durations of all ranks; of replicas the slower counts, milliseconds."""
    return slowest(rank.durations_ms for rank in ranks)


def batch_times(
    dag: PipelineDag, ranks: Sequence[RankBatches], delays_ms: ArrayLike | None = None
) -> dict[Phase, tuple[float, ...]]:
    """Return the time in milliseconds of all batches, by phase, oldest first.

    Ranks share no clock. A rank's span runs from the start of its first action to the end of its
    last; a batch runs from the start of the first rank's first action. The distance between the two
    starts is the measured time of the forwards in front of the rank's first action, which run
    without idle time but for messages. The batch ends with the last rank. Of repeated actions of
    replicas the slower counts.
    """
    durations_ms = np.zeros(len(dag.actions))
    for action, duration_ms in slowest_durations(ranks).items():
        durations_ms[dag.index[action]] = duration_ms
    starts_ms = start_times(dag, durations_ms, delays_ms)
    times: dict[Phase, list[float]] = {}
    offsets_ms = [
        min((starts_ms[dag.index[a]] for a in rank.durations_ms), default=0.0) for rank in ranks
    ]
    for batch in zip(*(rank.batches for rank in ranks), strict=False):
        ends_ms = (offset + span for offset, (_, span) in zip(offsets_ms, batch, strict=True))
        times.setdefault(Phase(batch[0][0]), []).append(max(ends_ms))
    return {phase: tuple(values) for phase, values in times.items()}


# Of fewer nobody can tell how they scatter.
FEWEST_BATCHES = 3
_QUANTILE = 0.95  # and as much below: 9 of 10 lie between
_WIDEST = 700.0  # whose exponential is still a number


def interval_factor(missed_by: Sequence[float]) -> float | None:
    """Return the factor f such that 9 of 10 batches take 1 / f to f times a prediction.

    ``missed_by`` is measured over simulated time of all batches of warm-up and monitoring, in
    order. None for fewer than 3 batches, or impossible times.
    """
    n = len(missed_by)
    if n < FEWEST_BATCHES or not all(0.0 < each < math.inf for each in missed_by):
        return None
    errors = [math.log(each) for each in missed_by]
    variance = math.fsum(error**2 for error in errors) / (n - 1)
    told = max(float(FEWEST_BATCHES), n / _alike(errors))
    spread = math.sqrt(variance * (1.0 + math.pi / (2.0 * told)))
    width = _student_quantile(told - 1.0) * spread
    return math.exp(width) if width < _WIDEST else None


def _alike(errors: Sequence[float]) -> float:
    """Return the number of neighbouring batches worth an independent batch, 1 or more."""
    n, mean = len(errors), math.fsum(errors) / len(errors)
    apart = [error - mean for error in errors]
    square = math.fsum(each**2 for each in apart)
    together = 1.0
    for k in range(1, n // 2):
        product = math.fsum(a * b for a, b in zip(apart[k:], apart[:-k], strict=True))
        if product <= 0.0:
            break
        together += 2.0 * (1.0 - k / n) * product / square
    return together


def _student_quantile(freedom: float) -> float:
    """Return Student's 95% quantile, 1.2% low for 2 degrees of freedom and 0.3% or less for more.

    The expansion of Cornish and Fisher (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(_QUANTILE)
    terms = (
        z,
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def within(factor: float | None) -> str:
    """Return in words how far batches lie from any prediction with this factor."""
    if factor is None:
        return f"interval unknown, fewer than {FEWEST_BATCHES} batches timed"
    low, high = 100 * (1 / factor - 1), 100 * (factor - 1)
    return f"9 of 10 batches within {low:+.1f}% to {high:+.1f}% if the machine goes on as measured"


def range_of(batch_ms: float, factor: float | None) -> str:
    """Return the interval around a predicted batch, such as "90.9 to 110.0 ms".

    "" where the factor is not known.
    """
    return "" if factor is None else f"{batch_ms / factor:,.1f} to {batch_ms * factor:,.1f} ms"


def holds_for(n_ranks: int, n_processors: float | None) -> str:
    """Return in words the ranks of a prediction."""
    if n_processors is None or n_processors >= n_ranks:
        return "a device or core of its own for each rank"
    cores = "1 core" if n_processors == 1 else f"{n_processors:g} cores"
    return f"{n_ranks} ranks that share {cores}"
