"""How far batches lie from what their times say, and for what ranks a prediction holds.

A prediction is a batch played from medians. Batches scatter around it, since machines do not run
evenly, and it may be wrong by something that it does not know. Both were seen while monitoring: a
batch b that took t_b, where the play of its own pattern takes p_b, was missed by e_b = ln(t_b /
p_b). So were the batches of the warm-up, which froze nothing: no bound comes from them, but they
tell for how long a machine keeps a speed. Another batch is missed like these n ones if the machine
goes on as it was. So:

- s^2 = sum(e_b^2) / (n - 1) is what a prediction is missed by, squared: around 0 and not around
  the mean of e, so that what all batches are late by is in it. The play is made from the median of
  the same n batches, which takes one of them.
- Batches that follow each other on one speed of the machine tell it once. With r_k, how alike
  batches are that are k apart (the autocorrelation of e, up to the first that is not positive),
  they tell as much as m = n / (1 + 2 sum (1 - k/n) r_k) ones that are not alike; 3 at least.
- The prediction itself scatters as a median of m does: pi/2 s^2 / m.
- With t, the 95% quantile of Student's distribution of m - 1 degrees of freedom, which is wide
  where s is known from few batches, 9 of 10 batches lie within exp(+-t s sqrt(1 + pi / 2m)).

The quantiles of e alone would promise too much: of 7 batches, which a short run has, the lowest and
the highest hold the next one in 6 of 8 cases. A median of many batches lies within as well: it
scatters less where batches are held up one by one, and as they do where a machine keeps one speed
for long. What lasts longer than warm-up and monitoring cannot be seen in it, nor what messages
cost once a plan has taken the waiting away: ``planning/rank_times.py`` widens it for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

# Of fewer nobody can tell how they scatter.
FEWEST_BATCHES = 3
_QUANTILE = 0.95  # and as much below: 9 of 10 lie between
_WIDEST = 700.0  # whose exponential is still a number


def interval_factor(missed_by: Sequence[float]) -> float | None:
    """Return the factor f such that 9 of 10 batches take between 1 / f and f times a prediction.

    Args:
        missed_by: Measured over played time of each batch of warm-up and monitoring, in the order
            in which they ran.

    Returns:
        float | None: 1 or more; None for fewer than 3 batches, or for times that cannot be.
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
    """Return how many batches in a row tell as much as one, 1 or more."""
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
    """Return in words what ranks a prediction is for.

    Args:
        n_ranks: Of the pipeline.
        n_processors: How many of them compute at once; None if each has a device of its own.
    """
    if n_processors is None or n_processors >= n_ranks:
        return "a device or core of its own for each rank"
    cores = "1 core" if n_processors == 1 else f"{n_processors:g} cores"
    return f"{n_ranks} ranks that share {cores}"
