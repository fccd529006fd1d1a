"""The split of layers over stages with the least largest load of a rank: exact, and pure.

A split is contiguous, hence given by the stages' numbers of layers, in order. Alike layers are
given by their number alone, and a rank may have several stages. With unlike layers, ranks have a
single stage.

Loads are whole numbers: nanoseconds, parameters, bytes. Of a rank with several stages the sum of
their times or parameters counts, and of memory the rank's peak.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from timelyfreeze.files import Count
from timelyfreeze.schedule import PipelineDag, ScheduleOrder, stages_of_ranks
from timelyfreeze.whatif.grid import Split, fewest_layers, layers_of_split
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel
from timelyfreeze.whatif.rank_memory import ModelBytes, parts_of, rank_memory
from timelyfreeze.whatif.times import FREE, Links, StageTimes, unfrozen_batch_ms

# What shares are compared by.
T = TypeVar("T", bound=Any)
# The first layer of a stage, and the one behind its last.
Span = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """The quantity balanced by a split."""

    # Loads of the parts of a rank, given its number and the layers of its stages, front to back.
    # Their sum is the load of the rank. None may fall when a stage gets a layer. Whole numbers, so
    # that what is equal compares as equal.
    of_rank: Callable[[int, Sequence[Span]], Sequence[int]]
    ranks: Sequence[Sequence[int]]  # the stages of each rank, front to back
    least: Split  # the fewest layers of each stage
    are_alike: bool = True  # whether all layers weigh the same, wherever they are

    def of_alike(self, rank: int, layers: Split) -> Sequence[int]:
        """Return ``of_rank`` by numbers of alike layers."""
        return self.of_rank(rank, [(0, n) for n in layers])

    def of_split(self, split: Sequence[int]) -> list[int]:
        """Return the loads of ranks under a split."""
        spans = [(layers.start, layers.stop) for layers in layers_of_split(split)]
        return [
            sum(self.of_rank(rank, [spans[stage] for stage in stages]))
            for rank, stages in enumerate(self.ranks)
        ]


# Every way to hand a rank's layers to its stages is tried; with more stages these are millions.
_MAX_STAGES_OF_A_RANK = 4


class _Share(NamedTuple):
    """A rank's share: the less of the first three, the better."""

    load: int
    parts: int  # squares of the loads of its parts
    squares: int  # squares of its stages' layers
    layers: Split


# From the first layer that a rank may have to the layer behind its last one, with its share.
_Options = Callable[[int], Iterable[tuple[int, _Share]]]


def min_max_split(n_layers: int, load: Load) -> Split:
    """Find the split with the smallest possible largest load of a rank.

    Of several the most even by sums of squares: ranks first, then the parts of ranks, then layers.
    A remainder goes to the front.
    """
    ranks, least = load.ranks, load.least
    if sum(least) > n_layers:
        raise ValueError(f"{n_layers} layers are too few for {len(least)} stages")
    if (most := max(map(len, ranks))) > _MAX_STAGES_OF_A_RANK:
        raise ValueError(
            f"a rank has {most} stages; a split is searched for up to {_MAX_STAGES_OF_A_RANK}"
        )
    if load.are_alike:
        limit = max(load.of_split(greedy_split(n_layers, load)))
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
    return tuple(split[stage] for stage in sorted(split))


def greedy_split(n_layers: int, load: Load) -> Split:
    """Return a good split of alike layers: one after another to the least loaded rank and stage."""
    split = list(load.least)
    rank_of = {stage: rank for rank, stages in enumerate(load.ranks) for stage in stages}

    def with_one_more(stage: int) -> tuple[int, int]:
        rank = rank_of[stage]
        layers = tuple(split[s] + (s == stage) for s in load.ranks[rank])
        return sum(load.of_alike(rank, layers)), split[stage]

    for _ in range(n_layers - sum(split)):
        split[min(range(len(split)), key=with_one_more)] += 1
    return tuple(split)


def _alike(
    load: Callable[[Split], Sequence[int]], least: Split, n_layers: int, limit: int
) -> _Options:
    """Return a rank's best share by number of layers, of loads up to ``limit``."""
    best: dict[int, _Share] = {}
    for layers in _up_to(load, least, n_layers, limit):
        share, n = _share(load(layers), layers), sum(layers)
        # Of equals the one with more layers in front.
        if n not in best or share[:3] <= best[n][:3]:
            best[n] = share
    shares = sorted(best.items(), reverse=True)
    return lambda start: ((start + n, share) for n, share in shares)


def _unlike(load: Load, rank: int, least: int, n_layers: int) -> _Options:
    """Return the shares of unlike layers for a rank with a single stage."""

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
    """Yield the layers of a rank's stages with a load up to ``limit``, front ones rising.

    Loads do not fall with layers, so the search ends at the first overload.
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
    """Return the least sum by ``add`` over shares of all layers, with the ranks' stages.

    Goes from the last rank to the first; equals are decided by more layers in front.
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


TIME, PARAMETERS, MEMORY = "time", "parameters", "memory"
PARTITIONS = (TIME, PARAMETERS, MEMORY)

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class PartParameters:
    """Numbers of parameters."""

    first: Count  # the embedding
    layers: tuple[Count, ...]  # each layer
    last: Count  # the last norm and the head

    @property
    def are_alike(self) -> bool:
        """Whether all layers have as many."""
        return len(set(self.layers)) == 1

    @property
    def units(self) -> list[int]:
        """Parameters of layers; embedding and head count with the first and the last."""
        units = list(self.layers)
        units[0] += self.first
        units[-1] += self.last
        return units


def time_load(model: LayerModel | BlockTimes, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of stages, nanoseconds: forward and full backward of a microbatch."""
    n_stages, ranks = len(stage_to_rank), stages_of_ranks(stage_to_rank)
    if isinstance(model, BlockTimes):
        stage_of, least = model.stage, fewest_layers(n_stages)
        return _sum_of_stages(
            lambda stage, *span: _work_ns(stage_of(stage, n_stages, *span)), ranks, least, False
        )
    # Not rounded for each number of layers: equal work shall be equal wherever its layers are.
    none = [_work_ns(model.stage(stage, n_stages, 0)) for stage in range(n_stages)]
    layer, least = _work_ns(model.layer), model.least_layers(n_stages)
    return _sum_of_stages(
        lambda stage, start, stop: none[stage] + (stop - start) * layer, ranks, least, True
    )


def _work_ns(times: StageTimes) -> int:
    return round(_NS_PER_MS * (times.forward_ms + times.backward_ms))


def parameter_load(sizes: PartParameters, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of stages: their parameters."""
    n_stages, before = len(stage_to_rank), [0, *accumulate(sizes.layers)]

    def of_stage(stage: int, start: int, stop: int) -> int:
        ends = sizes.first * (stage == 0) + sizes.last * (stage == n_stages - 1)
        return ends + before[stop] - before[start]

    ranks, least = stages_of_ranks(stage_to_rank), fewest_layers(n_stages)
    return _sum_of_stages(of_stage, ranks, least, sizes.are_alike)


def _sum_of_stages(
    of_stage: Callable[[int, int, int], int],
    ranks: Sequence[Sequence[int]],
    least: Split,
    are_alike: bool,
) -> Load:
    """Return a load summed over a rank's stages, from their layers."""

    def of_rank(rank: int, spans: Sequence[Span]) -> list[int]:
        return [of_stage(stage, *span) for stage, span in zip(ranks[rank], spans, strict=True)]

    return Load(of_rank, ranks, least, are_alike)


def memory_load(model: ModelBytes, order: ScheduleOrder) -> Load:
    """Return the load of a rank: bytes at the fullest moment of its schedule."""
    ranks = stages_of_ranks(order.stage_to_rank)

    def of_rank(rank: int, spans: Sequence[Span]) -> list[int]:
        stages = {
            stage: {
                **parts_of(stage, order.n_stages, 0),
                **Counter(map(model.layer_name, range(start, stop))),
            }
            for stage, (start, stop) in zip(ranks[rank], spans, strict=True)
        }
        return [rank_memory(model, stages, order.ranks[rank], order).total]

    return Load(of_rank, ranks, fewest_layers(order.n_stages), model.are_alike)


# Beyond so many actions times splits in a round, the search for the best split stops at the most
# even one: a round would take minutes.
_MAX_ACTIONS_IN_ROUND = 2_000_000


def best_split(
    model: LayerModel | BlockTimes,
    dag: PipelineDag,
    n_processors: float | None = None,
    also: Sequence[Split] = (),
    links: Links = FREE,
) -> Split:
    """Move layers until no batch without freezing would end sooner.

    Starts from the split with the least largest load, or a faster split of ``also``, and moves a
    single layer at a time, the most helpful first. The result is no slower than any start;
    optimality is not proved.
    """
    rank_of = dict(zip(dag.stages.tolist(), dag.ranks.tolist(), strict=True))
    load = time_load(model, [rank_of[stage] for stage in range(dag.n_stages)])
    split = greedy_split if load.are_alike else min_max_split
    return shortest_split(
        [split(model.n_layers, load), *also],
        load.least,
        lambda split: unfrozen_batch_ms(dag, model.times(split), n_processors, links),
        n_actions=len(dag.actions),
    )


def shortest_split(
    starts: Sequence[Split],
    min_layers: Split,
    batch_ms: Callable[[Split], float],
    *,
    n_actions: int,
) -> Split:
    """Take the best of ``starts`` and move a layer at a time while the batch gets shorter.

    ``n_actions`` of a batch bound the cost of ``batch_ms``.
    """
    best = min((batch_ms(split), split) for split in starts)
    if n_actions * len(min_layers) ** 2 > _MAX_ACTIONS_IN_ROUND:
        return best[1]
    while True:
        nearby = ((batch_ms(split), split) for split in _neighbours(best[1], min_layers))
        found = min(nearby, default=best)
        if found[0] >= best[0]:
            return best[1]
        best = found


def _neighbours(split: Split, min_layers: Split) -> Iterator[Split]:
    """Yield every split with a single layer moved."""
    for giver, taker in itertools.permutations(range(len(split)), 2):
        if split[giver] > min_layers[giver]:
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)
