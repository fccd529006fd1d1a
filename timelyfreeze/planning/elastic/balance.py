"""Contiguous cuts of a model into ranks: PipeTransformer's greedy one, and the most even one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

# How many units each rank has, front to back.
Balance = tuple[int, ...]
# Whether a rank has room for units ``start`` to ``stop`` - 1: (rank, start, stop).
HasRoom = Callable[[int, int, int], bool]

_MILLION = 1_000_000


def paper_balance(
    sizes: Sequence[int], n_ranks: int, n_frozen: int = 0, lambda_: float = 0.0
) -> tuple[Balance, float]:
    """Cut a model as ``load_balance`` of PipeTransformer's Algorithm 1 does.

    Rank k takes live units while its size with the next one stays below mean + var, of the units
    that are left over K - k ranks; the last rank takes the rest. The variance is in squared units
    of the mean, so the unit decides: it is a million parameters, as in the authors' program.
    Sums are exact, for a tie must not hang on rounding.

    Our reading of the first rank: it holds the frozen units too, and of their size S_f only
    lambda S_f counts. In print its size begins at 0 and S_f (1 - lambda) is taken off all the same.

    Args:
        sizes: Parameters of each unit, front to back.
        n_ranks: K.
        n_frozen: How many units in front are frozen.
        lambda_: What a frozen unit costs over a live one.

    Returns:
        Live units of each rank, which may be 0, and the size of the largest rank, in parameters.
    """
    live = [Fraction(size, _MILLION) for size in sizes[n_frozen:]]
    # 1 / 6 as a float is a little less than a sixth.
    share = Fraction(lambda_).limit_denominator(_MILLION)
    held = Fraction(sum(sizes[:n_frozen]), _MILLION) * share
    counts, loads, at = [], [], 0
    for k in range(n_ranks):
        limit = _mean(live[at:], n_ranks - k) + _variance(live[at:]) / (n_ranks - k)
        start = at
        while at < len(live) and (k == n_ranks - 1 or held + live[at] < limit):
            held += live[at]
            at += 1
        counts.append(at - start)
        loads.append(held)
        held = Fraction(0)
    return tuple(counts), float(max(loads) * _MILLION)


def _mean(values: Sequence[Fraction], n: int) -> Fraction:
    return sum(values, Fraction(0)) / n


def _variance(values: Sequence[Fraction]) -> Fraction:
    """Return the variance over all values, as numpy has it; 0 where none is left."""
    if not values:
        return Fraction(0)
    mean = _mean(values, len(values))
    return _mean([(value - mean) ** 2 for value in values], len(values))


def min_max_balance(
    sizes: Sequence[float], n_ranks: int, has_room: HasRoom | None = None
) -> tuple[Balance, float] | None:
    """Cut a model so that the largest rank is as small as can be; exact.

    Of several such cuts the one with the smallest sum of squares is taken.

    Args:
        sizes: Size of each unit, front to back, 0 or more.
        n_ranks: Number of ranks; each gets a unit or more.
        has_room: What a rank can hold; None for everything.

    Returns:
        Units of each rank, and the size of the largest; None if there is no such cut.
    """
    sums = [math.fsum(sizes[:i]) for i in range(len(sizes) + 1)]

    def size(rank: int, start: int, stop: int) -> float:
        if has_room is not None and not has_room(rank, start, stop):
            return math.inf
        return sums[stop] - sums[start]

    largest, _ = _best_cut(len(sizes), n_ranks, size, max)
    if largest == math.inf:
        return None

    def square(rank: int, start: int, stop: int) -> float:
        load = size(rank, start, stop)
        return load * load if load <= largest else math.inf

    _, cuts = _best_cut(len(sizes), n_ranks, square, lambda a, b: a + b)
    return tuple(b - a for a, b in itertools.pairwise(cuts)), largest


def _best_cut(
    n_units: int,
    n_ranks: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the least joined cost of ranks, and where they begin and the last one ends."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for rank in range(n_ranks):
        found: dict[int, tuple[float, list[int]]] = {}
        for stop in range(rank + 1, n_units - (n_ranks - rank - 1) + 1):
            starts = [start for start in best if start < stop]
            costs = [join(best[start][0], cost(rank, start, stop)) for start in starts]
            at = min(range(len(starts)), key=costs.__getitem__)
            found[stop] = costs[at], [*best[starts[at]][1], stop]
        best = found
    return best.get(n_units, (math.inf, []))
