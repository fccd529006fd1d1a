"""How a pipeline shrinks as its front freezes: fewer ranks, another cut, more replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from timelyfreeze.planning.elastic.balance import Balance, min_max_balance, paper_balance

PARAMETERS, TIME = "parameters", "time"
# PipeTransformer, Sec. 3.2.1: what a frozen layer takes of a device's memory over a live one.
FROZEN_COST = 1.0 / 6.0

# Whether rank ``rank`` of ``n_ranks`` has room for units ``start`` to ``stop`` - 1.
Fits = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class ElasticPlan:
    """A pipeline for what is still live.

    Attributes:
        n_ranks: Ranks of a pipeline, K'.
        split: Units of each rank, frozen ones included, front to back.
        n_replicas: Pipelines side by side.
        n_microbatches: Microbatches of each replica; of all of them together as many as before.
        largest: Size of the largest rank, in the unit that was balanced.
    """

    n_ranks: int
    split: Balance
    n_replicas: int
    n_microbatches: int
    largest: float

    @property
    def ranks_used(self) -> int:
        """Ranks of all replicas."""
        return self.n_ranks * self.n_replicas


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
    on the first rank. Of an odd K the half is rounded down. Readings of the cut itself:
    ``paper_balance``. Microbatches keep their size and the global batch its own, so replicas
    divide the microbatches; the paper lets the global batch grow, and searches their number from K
    to 6 K by measuring.

    ``TIME`` cuts where the largest rank takes least time, frozen units wherever that puts them.

    Args:
        sizes: Of each unit, front to back: parameters; with ``TIME`` milliseconds of a microbatch
            in its present state, which for a frozen unit is its forward alone. The paper's units
            are attention and MLP sublayers. A run moves whole layers, which find fewer cuts: of 12
            layers of ViT-B/16 on 8 ranks 5, 6, 7 or 9 frozen ones have none, all sublayers do.
            Embedding and head belong to the first and the last one.
        n_frozen: How many units in front are frozen; at least one is live.
        n_ranks: Ranks of the pipeline at the start, K.
        lambda_: Cost of a frozen unit over a live one, in [0, 1]; not used with ``TIME``.
        largest_at_start: Largest rank of the pipeline at the start, M0, as ``sizes``.
        n_microbatches: Microbatches of a batch.
        min_ranks: It becomes no shorter.
        partition: ``PARAMETERS`` or ``TIME``.
        fits: What ranks have room for; with ``TIME`` it then decides in the place of M0.

    Raises:
        ValueError: If an argument is out of range, or a rank would get no unit.
    """
    _check(sizes, n_frozen, n_ranks, lambda_, n_microbatches, partition)

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
            f"{partition}" + ("" if found is None else f": they would have {_text(found[0])}")
        )
    split, largest = found
    n_replicas = replicas_of(n_ranks, k, n_microbatches)
    return ElasticPlan(k, split, n_replicas, n_microbatches // n_replicas, largest)


def replicas_of(n_ranks: int, n_ranks_each: int, n_microbatches: int) -> int:
    """Return how many pipelines there is room for that share the microbatches evenly."""
    room = n_ranks // n_ranks_each
    return max(n for n in range(1, room + 1) if n_microbatches % n == 0)


def _check(
    sizes: Sequence[float],
    n_frozen: int,
    n_ranks: int,
    lambda_: float,
    n_microbatches: int,
    partition: str,
) -> None:
    if partition not in (PARAMETERS, TIME):
        raise ValueError(f"partition is {partition!r}; it must be {PARAMETERS!r} or {TIME!r}")
    if not all(0.0 <= size < math.inf for size in sizes):
        raise ValueError(f"sizes are {_text(sizes)}; each must be finite and 0 or more")
    if partition == PARAMETERS and any(size != int(size) for size in sizes):
        raise ValueError(f"sizes are {_text(sizes)}; numbers of parameters are whole")
    if not 0 <= n_frozen < len(sizes):
        raise ValueError(
            f"n_frozen is {n_frozen} of {len(sizes)} units; it must be 0 or more, and leave one "
            "live"
        )
    if not 0.0 <= lambda_ <= 1.0:
        raise ValueError(f"lambda_ is {lambda_}; it must lie in [0, 1]")
    for name, count in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be 1 or more")


def _text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
