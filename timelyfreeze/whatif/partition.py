"""The split of layers over stages whose most loaded rank has least: exact, and pure.

A split is contiguous, so it is the number of layers of each stage, in order. Where layers are
alike, what a stage has is told by their number alone, and a rank may have several stages. Where
they differ, each rank has one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from timelyfreeze.whatif.grid import Split

# What shares are compared by.
T = TypeVar("T", bound=Any)
# The first layer of a stage, and the one behind its last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """What a split makes even."""

    # Loads of the parts of a rank, given its number and the layers of its stages, front to back.
    # Their sum is the load of the rank. None may fall when a stage gets a layer. Whole numbers, so
    # that what is equal compares as equal.
    of_rank: Callable[[int, Sequence[Span]], Sequence[int]]
    are_alike: bool = True  # whether all layers weigh the same, wherever they are

    def of_alike(self, rank: int, layers: Split) -> Sequence[int]:
        """Return ``of_rank`` for so many layers of each stage, whichever they are."""
        return self.of_rank(rank, [(0, n) for n in layers])


# Every way to hand a rank's layers to its stages is tried; with more stages these are millions.
_MAX_STAGES_OF_A_RANK = 4


class _Share(NamedTuple):
    """What a rank may have: the less of the first three, the better."""

    load: int
    parts: int  # squares of the loads of its parts
    squares: int  # squares of its stages' layers
    layers: Split


# From the first layer that a rank may have to the layer behind its last one, with its share.
_Options = Callable[[int], Iterable[tuple[int, _Share]]]


def stages_of_ranks(stage_to_rank: Sequence[int]) -> list[list[int]]:
    """Return the stages of each rank, front to back."""
    ranks = range(1 + max(stage_to_rank))
    return [[stage for stage, r in enumerate(stage_to_rank) if r == rank] for rank in ranks]


def fewest_layers(n_stages: int) -> Split:
    """Return the fewest layers of each stage: the ends have embedding and head and may do without.

    ``n_stages`` is 2 or more.
    """
    return (0, *[1] * (n_stages - 2), 0)


def min_max_split(
    n_layers: int, stage_to_rank: Sequence[int], load: Load, least: Sequence[int]
) -> Split:
    """Find the split whose largest load of a rank is as small as can be.

    Of several the one whose loads are most even: ranks first, then the parts of ranks, then layers,
    each by the sum of their squares. What is left over goes to the front.

    Args:
        n_layers: Layers to hand out.
        stage_to_rank: Rank that holds each stage.
        load: Loads of a rank.
        least: The fewest layers that each stage may have.

    Returns:
        Split: Layers of each stage.

    Raises:
        ValueError: If there are too few layers, or a rank has so many stages that the search would
            take too long, or several where layers differ.
    """
    ranks = stages_of_ranks(stage_to_rank)
    if sum(least) > n_layers:
        raise ValueError(f"{n_layers} layers are too few for {len(stage_to_rank)} stages")
    if (most := max(map(len, ranks))) > _MAX_STAGES_OF_A_RANK:
        raise ValueError(
            f"a rank has {most} stages; a split is searched for up to {_MAX_STAGES_OF_A_RANK}"
        )
    if load.are_alike:
        greedy = greedy_split(n_layers, stage_to_rank, load, least)
        limit = max(
            sum(load.of_alike(rank, tuple(greedy[s] for s in stages)))
            for rank, stages in enumerate(ranks)
        )
        options = [
            _alike(partial(load.of_alike, rank), tuple(least[s] for s in stages), n_layers, limit)
            for rank, stages in enumerate(ranks)
        ]
    elif most > 1:
        raise ValueError(
            f"a rank has {most} stages, and the layers of the model differ; they are split over"
            " ranks of one stage, as GPipe and 1F1B have"
        )
    else:
        options = [_unlike(load, r, least[stage], n_layers) for r, (stage,) in enumerate(ranks)]
    largest, _ = _least(n_layers, options, 0, lambda share, behind: max(share.load, behind))

    def unevenness(share: _Share, behind: tuple[float, int, int]) -> tuple[float, int, int]:
        ranks = share.load**2 if share.load <= largest else math.inf
        return behind[0] + ranks, behind[1] + share.parts, behind[2] + share.squares

    even: tuple[float, int, int] = (0, 0, 0)  # whole numbers are exact, however large
    _, layers = _least(n_layers, options, even, unevenness)
    split = dict(zip(itertools.chain(*ranks), itertools.chain(*layers), strict=True))
    return tuple(split[stage] for stage in range(len(stage_to_rank)))


def greedy_split(
    n_layers: int, stage_to_rank: Sequence[int], load: Load, least: Sequence[int]
) -> Split:
    """Return a good split of layers that are alike: each goes to the rank that then has least.

    On it the stage with the fewest layers gets it. Arguments are those of ``min_max_split``.
    """
    ranks, split = stages_of_ranks(stage_to_rank), list(least)

    def with_one_more(stage: int) -> tuple[int, int]:
        rank = stage_to_rank[stage]
        layers = tuple(split[s] + (s == stage) for s in ranks[rank])
        return sum(load.of_alike(rank, layers)), split[stage]

    for _ in range(n_layers - sum(least)):
        split[min(range(len(split)), key=with_one_more)] += 1
    return tuple(split)


def _alike(
    load: Callable[[Split], Sequence[int]], least: Split, n_layers: int, limit: int
) -> _Options:
    """Return a rank's best way to have each number of layers, of loads up to ``limit``."""
    best: dict[int, _Share] = {}
    for layers in _up_to(load, least, n_layers, limit):
        share, n = _share(load(layers), layers), sum(layers)
        # Of equals the one with more layers in front.
        if n not in best or share[:3] <= best[n][:3]:
            best[n] = share
    shares = sorted(best.items(), reverse=True)
    return lambda start: ((start + n, share) for n, share in shares)


def _unlike(load: Load, rank: int, least: int, n_layers: int) -> _Options:
    """Return the ways in which a rank of one stage can have layers that differ."""

    @functools.cache
    def options(start: int) -> list[tuple[int, _Share]]:
        return [
            (stop, _share(load.of_rank(rank, [(start, stop)]), (stop - start,)))
            for stop in range(n_layers, start + least - 1, -1)
        ]

    return options


def _share(parts: Sequence[int], layers: Split) -> _Share:
    squares = sum(part * part for part in parts), sum(n * n for n in layers)
    return _Share(sum(parts), *squares, layers)


def _up_to(
    load: Callable[[Split], Sequence[int]], least: Split, n_layers: int, limit: int
) -> Iterator[Split]:
    """Yield the layers of a rank's stages whose load is at most ``limit``, front ones rising.

    Loads do not fall with layers, so beyond the first that is too large there is none.
    """

    def extend(front: Split, rest: Split) -> Iterator[Split]:
        if not rest:
            yield front
            return
        for n in itertools.count(rest[0]):
            lowest = (*front, n, *rest[1:])
            if sum(lowest) > n_layers or sum(load(lowest)) > limit:
                return
            yield from extend((*front, n), rest[1:])

    return extend((), least)


def _least(
    n_layers: int, options: Sequence[_Options], nothing: T, add: Callable[[_Share, T], T]
) -> tuple[T, tuple[Split, ...]]:
    """Hand out the layers so that what ``add`` makes of all shares is least.

    Goes from the last rank to the first; of equals the one with more layers in front is taken.

    Returns:
        The least, and the layers of each rank's stages.
    """
    # By the layer that the ranks from here on begin with.
    best: dict[int, tuple[T, tuple[Split, ...]]] = {n_layers: (nothing, ())}
    for each in reversed(options):
        found = {}
        for start in range(n_layers + 1):
            ways = [
                (add(share, best[stop][0]), share.layers, best[stop][1])
                for stop, share in each(start)
                if stop in best
            ]
            if ways:
                value, layers, behind = min(ways, key=lambda way: way[0])
                found[start] = value, (layers, *behind)
        best = found
    return best[0]
