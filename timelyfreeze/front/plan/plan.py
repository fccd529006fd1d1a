"""How a pipeline shrinks as its front freezes: fewer ranks, another cut, more replicas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile
from statistics import pvariance

# How many units each rank has, front to back.
Balance = tuple[int, ...]
# Whether a rank has room for units ``start`` to ``stop`` - 1: (rank, start, stop).
HasRoom = Callable[[int, int, int], bool]

_MILLION = 1_000_000


def paper_balance(
    sizes: Sequence[int], n_ranks: int, n_frozen: int = 0, lambda_: float = 0.0
) -> tuple[Balance, float]:
    """Cut a model as ``load_balance`` of PipeTransformer's Algorithm 1.

    Rank k takes live units while its size with the next unit stays below mean + var of the
    remaining units over K - k ranks; the last rank takes the rest. The variance is in squared units
    of the mean, so the unit decides: a million parameters, as in the authors' program. Sums are
    exact, for a tie must not hang on rounding.

    Our reading of the first rank: with the frozen units too, and of their size S_f only lambda S_f
    counts. In print the size begins at 0 and S_f (1 - lambda) is taken off all the same. Returns
    the live units per rank, possibly 0, and the size of the largest rank, in parameters.
    """
    live = [Fraction(size, _MILLION) for size in sizes[n_frozen:]]
    # 1 / 6 as a float is a little less than a sixth.
    share = Fraction(lambda_).limit_denominator(_MILLION)
    held = Fraction(sum(sizes[:n_frozen]), _MILLION) * share
    counts, loads, at = [], [], 0
    for k in range(n_ranks):
        rest = live[at:]
        spread = pvariance(rest) if rest else Fraction(0)
        limit = sum(rest, spread) / (n_ranks - k)
        start = at
        while at < len(live) and (k == n_ranks - 1 or held + live[at] < limit):
            held += live[at]
            at += 1
        counts.append(at - start)
        loads.append(held)
        held = Fraction(0)
    return tuple(counts), float(max(loads) * _MILLION)


def min_max_balance(
    sizes: Sequence[float], n_ranks: int, has_room: HasRoom | None = None
) -> tuple[Balance, float] | None:
    """Cut a model with the smallest possible largest rank; exact.

    Among equal cuts the smallest sum of squares wins. All ranks get a unit or more. Returns the
    numbers of units and the largest size; None without such a cut.
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
    return tuple(b - a for a, b in pairwise(cuts)), largest


def _best_cut(
    n_units: int,
    n_ranks: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the least joint cost of ranks, and the bounds between them."""
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


PARAMETERS, TIME = "parameters", "time"
# PipeTransformer, Sec. 3.2.1: what a frozen layer takes of a device's memory over a live one.
FROZEN_COST = 1.0 / 6.0

# Whether rank ``rank`` of ``n_ranks`` has room for units ``start`` to ``stop`` - 1.
Fits = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class ElasticPlan:
    """A pipeline for the live units."""

    n_ranks: int  # ranks of a pipeline, K'
    split: Balance  # units of each rank, frozen ones included, front to back
    n_replicas: int  # pipelines side by side
    n_microbatches: int  # microbatches of each replica; of all of them together as many as before
    largest: float  # size of the largest rank, in the unit that was balanced


def elastic_plan(
    sizes: Sequence[float],
    n_frozen: int,
    n_ranks: int,
    lambda_: float = FROZEN_COST,
    largest_at_start: float = math.inf,
    *,
    n_microbatches: int,
    min_ranks: int = 1,
    partition: str = PARAMETERS,
    fits: Fits | None = None,
) -> ElasticPlan:
    """Shrink a pipeline as long as its largest rank gets no larger than at the start.

    ``PARAMETERS`` is PipeTransformer's Algorithm 1: while K >= 2, cut for K/2 ranks, and go on with
    those if the largest is at most M0 (Eq. 2; the pseudocode has "less than"). All frozen units are
    on the first rank. Of an odd K the half is rounded down. Readings of the cut: ``paper_balance``.
    Microbatches keep their size and the global batch its own, so replicas divide the microbatches;
    the paper lets the global batch grow, and searches their number from K to 6 K by measuring.

    ``TIME`` cuts where the largest rank takes least time, frozen units on any rank. Sizes are
    parameters, whole numbers; with ``TIME`` milliseconds of a microbatch in its present state, for
    a frozen unit its forward alone. The paper's units are attention and MLP sublayers. Whole
    layers have fewer cuts: of 12 layers of ViT-B/16 on 8 ranks 5, 6, 7 or 9 frozen layers have
    none, all sublayers do. Embedding and head belong to the first and last unit. ``lambda_``,
    not used with ``TIME``, is the cost of a frozen unit over a live one; ``largest_at_start`` is
    M0, in whose place ``fits`` decides with ``TIME``. A rank without a unit is a ValueError.
    """

    def cut(k: int) -> tuple[Balance, float] | None:
        if partition == TIME:
            room = None if fits is None else lambda *span: fits(k, *span)
            return min_max_balance(sizes, k, room)
        live, largest = paper_balance([int(s) for s in sizes], k, n_frozen, lambda_)
        return (live[0] + n_frozen, *live[1:]), largest

    limit = math.inf if partition == TIME and fits is not None else largest_at_start
    k = n_ranks
    while k >= 2 and k // 2 >= min_ranks:
        halved = cut(k // 2)
        if halved is None or halved[1] > limit:
            break
        k //= 2
    found = cut(k)
    if found is None or 0 in found[0]:
        raise ValueError(
            f"{len(sizes)} units, {n_frozen} of them frozen, cannot be cut for {k} ranks by "
            f"{partition}"
            + ("" if found is None else f": they would have {', '.join(map(str, found[0]))}")
        )
    split, largest = found
    n_replicas = replicas_of(n_ranks, k, n_microbatches)
    return ElasticPlan(k, split, n_replicas, n_microbatches // n_replicas, largest)


def replicas_of(n_ranks: int, n_ranks_each: int, n_microbatches: int) -> int:
    """Return the number of pipelines with room and equal shares of the microbatches."""
    room = n_ranks // n_ranks_each
    return max(n for n in range(1, room + 1) if n_microbatches % n == 0)


@dataclass(frozen=True)
class BatchPacking:
    """How a step's rows come together."""

    factor: int  # rows of a worker's batch, over those at the start
    accumulations: int  # batches of a worker whose gradients are added up in a step
    growth: int = 1  # rows of a step, over those at the start


def performance_packing(
    fits: Callable[[int], bool], accumulations: int, max_growth: int = 1
) -> BatchPacking:
    """Return the packing with the largest batch there is room for.

    Steps first take fewer batches of more rows, the same rows in all; from a single batch on, steps
    take more rows, in whole multiples of the start. ``fits`` tells whether a worker has room for a
    batch so many times the first size.
    """
    same_rows = [
        BatchPacking(n, accumulations // n)
        for n in range(1, accumulations + 1)
        if accumulations % n == 0
    ]
    more_rows = [BatchPacking(accumulations * n, 1, n) for n in range(2, max_growth + 1)]
    larger = [*same_rows[1:], *more_rows]
    return [same_rows[0], *takewhile(lambda packing: fits(packing.factor), larger)][-1]


def last_step(n_steps: int, step: int, n_batches: int, growth: int) -> int:
    """Return the step at which a run has read its rows.

    ``n_batches`` were read by the finished ``step``, ``growth`` per step from now on, both in steps
    of the start. The last step is whole, and may read up to ``growth`` - 1 more.
    """
    return step + -(-(n_steps - n_batches) // growth)
