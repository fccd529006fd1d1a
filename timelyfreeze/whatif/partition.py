"""The split of layers over stages whose most loaded rank has least: exact, and pure.

A split is contiguous, so it is the number of layers of each stage, in order. Where layers are
alike, what a stage has is told by their number alone, and a rank may have several stages. Where
they differ, each rank has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from timelyfreeze.whatif.grid import Split

# The first layer of a stage, and the one behind its last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """What a split makes even.

    Attributes:
        of_rank: Loads of the parts of a rank, given its number and the layers of its stages, front
            to back. Their sum is the load of the rank. None may fall when a stage gets a layer.
            Whole numbers, so that what is equal compares as equal.
        are_alike: Whether all layers weigh the same, wherever they are.
    """

    of_rank: Callable[[int, Sequence[Span]], Sequence[int]]
    are_alike: bool = True

    def of_alike(self, rank: int, layers: Split) -> Sequence[int]:
        """Return ``of_rank`` for so many layers of each stage, whichever they are."""
        return self.of_rank(rank, [(0, n) for n in layers])


# Every way to hand a rank's layers to its stages is tried; with more stages these are millions.
_MAX_STAGES_OF_A_RANK = 4
# Load of the rank, squares of its parts, squares of its stages' layers, and these layers.
_Share = tuple[int, int, int, Split]


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
    if not load.are_alike:
        if most > 1:
            raise ValueError(
                f"a rank has {most} stages, and the layers of the model differ; they are split over"
                " ranks of one stage, as GPipe and 1F1B have"
            )
        return _split_of_unlike(n_layers, load, [least[stage] for (stage,) in ranks])
    limit = _greedy_load(n_layers, ranks, load, least)
    shares = [
        _shares(partial(load.of_alike, rank), [least[s] for s in stages], n_layers, limit)
        for rank, stages in enumerate(ranks)
    ]
    largest = _smallest_largest(n_layers, shares)
    split = [0] * len(stage_to_rank)
    for stages, layers in zip(ranks, _most_even(n_layers, shares, largest), strict=True):
        for stage, n in zip(stages, layers, strict=True):
            split[stage] = n
    return tuple(split)


def _greedy_load(
    n_layers: int, ranks: Sequence[Sequence[int]], load: Load, least: Sequence[int]
) -> int:
    """Return the largest load of a good split: every layer goes where it makes least."""
    split = list(least)

    def load_of(rank: int) -> int:
        return sum(load.of_alike(rank, tuple(split[s] for s in ranks[rank])))

    def load_with_one_more(stage: int, rank: int) -> int:
        split[stage] += 1
        found = load_of(rank)
        split[stage] -= 1
        return found

    places = [(stage, rank) for rank, stages in enumerate(ranks) for stage in stages]
    for _ in range(n_layers - sum(least)):
        stage, _ = min(places, key=lambda place: load_with_one_more(*place))
        split[stage] += 1
    return max(load_of(rank) for rank in range(len(ranks)))


def _shares(
    load: Callable[[Split], Sequence[int]], least: Sequence[int], n_layers: int, limit: int
) -> dict[int, _Share]:
    """Return a rank's best way to have each number of layers, of loads up to ``limit``."""
    best: dict[int, _Share] = {}
    for layers in _up_to(load, tuple(least), n_layers, limit):
        parts = load(layers)
        squares = sum(part * part for part in parts), sum(n * n for n in layers)
        share = (sum(parts), *squares, tuple(-n for n in layers))
        n = sum(layers)
        if n not in best or share < best[n]:
            best[n] = share
    return {n: (*share[:3], tuple(-k for k in share[3])) for n, share in best.items()}


def _up_to(
    load: Callable[[Split], Sequence[int]], least: Split, n_layers: int, limit: int
) -> Iterator[Split]:
    """Yield the layers of a rank's stages whose load is at most ``limit``.

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


def _smallest_largest(n_layers: int, shares: Sequence[dict[int, _Share]]) -> int:
    """Return the smallest load up to which the ranks can take all layers.

    Up to a load a rank takes any number of layers from its fewest to its most.
    """
    loads = sorted({share[0] for each in shares for share in each.values()})

    def takes_all(limit: int) -> bool:
        fitting = [[n for n, share in each.items() if share[0] <= limit] for each in shares]
        return all(fitting) and sum(map(max, fitting)) >= n_layers

    low, high = 0, len(loads) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if takes_all(loads[middle]) else (middle + 1, high)
    return loads[low]


def _most_even(n_layers: int, shares: Sequence[dict[int, _Share]], largest: int) -> list[Split]:
    """Return each rank's layers in the most even split with loads up to ``largest``."""
    # By layers left for the ranks from here on: how uneven, and what each of them has.
    best: dict[int, tuple[tuple[int, int, int], list[Split]]] = {0: ((0, 0, 0), [])}
    for each in reversed(shares):
        found: dict[int, tuple[tuple[int, int, int], list[Split]]] = {}
        for n, (load, parts, squares, layers) in sorted(each.items(), reverse=True):
            if load > largest:
                continue
            for left, (uneven, behind) in best.items():
                key = uneven[0] + load * load, uneven[1] + parts, uneven[2] + squares
                total = n + left
                if total <= n_layers and (total not in found or key < found[total][0]):
                    found[total] = key, [layers, *behind]
        best = found
    return best[n_layers][1]


# -- layers that differ ----------------------------------------------------------------------------


def _split_of_unlike(n_layers: int, load: Load, least: Sequence[int]) -> Split:
    """Return ``min_max_split`` of ranks that have one stage each, from the last to the first."""
    places = range(n_layers + 1)
    parts = [
        {
            (start, stop): load.of_rank(rank, [(start, stop)])
            for start in places
            for stop in places[start + n :]
        }
        for rank, n in enumerate(least)
    ]
    largest = _smallest_of_unlike(n_layers, parts)
    # By the layer that the ranks from here on begin with: how uneven they are, and their layers.
    best: dict[int, tuple[tuple[int, int, int], Split]] = {n_layers: ((0, 0, 0), ())}
    for each in reversed(parts):
        found: dict[int, tuple[tuple[int, int, int], Split]] = {}
        # From the back, so that of equals the one with more layers in front comes first.
        for (start, stop), of_rank in sorted(each.items(), reverse=True):
            if stop not in best or sum(of_rank) > largest:
                continue
            n, (uneven, behind) = stop - start, best[stop]
            squares = sum(of_rank) ** 2, sum(part * part for part in of_rank), n * n
            key = uneven[0] + squares[0], uneven[1] + squares[1], uneven[2] + squares[2]
            if start not in found or key < found[start][0]:
                found[start] = key, (n, *behind)
        best = found
    return best[0][1]


def _smallest_of_unlike(n_layers: int, parts: Sequence[Mapping[Span, Sequence[int]]]) -> int:
    """Return the smallest load up to which the ranks can take all layers."""
    largest = {n_layers: 0}
    for each in reversed(parts):
        found: dict[int, int] = {}
        for (start, stop), of_rank in each.items():
            if stop in largest:
                here = max(sum(of_rank), largest[stop])
                found[start] = min(here, found.get(start, here))
        largest = found
    return largest[0]
