"""The split with the shortest batch; nothing frozen, it is what freezing has to beat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from timelyfreeze.schedule import PipelineDag
from timelyfreeze.whatif.block_times import BlockTimes
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.loads import time_load
from timelyfreeze.whatif.partition import min_max_split
from timelyfreeze.whatif.times import Links, unfrozen_batch_ms

# Beyond so many actions times splits in a round, the search for the best split stops at the most
# even one: a round would take minutes.
_MAX_ACTIONS_IN_ROUND = 2_000_000
_FREE = Links()


def best_split(
    model: LayerModel | BlockTimes,
    dag: PipelineDag,
    n_processors: float | None = None,
    also: Sequence[Split] = (),
    links: Links = _FREE,
) -> Split:
    """Move layers until no batch without freezing would end sooner.

    Starts from the split whose most loaded rank has least to do, or from one of ``also`` where that
    is faster, and moves one layer at a time, always the one that helps most. The result is no
    slower than any of these; that no other split is faster is not proved.

    Args:
        model: Overheads of layers.
        dag: The schedule.
        n_processors: As for ``play_batch``.
        also: Splits to start from if they are faster.
        links: What messages cost.

    Returns:
        Split: Layers of each stage.

    Raises:
        ValueError: If there are too few layers for the stages.
    """
    min_layers = model.least_layers(dag.n_stages)
    return shortest_split(
        [_even_split(model, dag, min_layers), *also],
        min_layers,
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

    Args:
        starts: Layers of each stage.
        min_layers: The fewest layers that each stage may have.
        batch_ms: Time of a batch with a split.
        n_actions: Actions of a batch, which tell how long that takes to find.
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
    """Yield every split that differs by one layer moved."""
    for giver, taker in itertools.permutations(range(len(split)), 2):
        if split[giver] > min_layers[giver]:
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def _even_split(model: LayerModel | BlockTimes, dag: PipelineDag, min_layers: Split) -> Split:
    """Return the split that keeps the work of the most loaded rank as small as can be.

    Layers that are alike are handed out one by one, each to the rank that then has least to do.
    """
    n_stages, split = dag.n_stages, list(min_layers)
    rank_of = dict(zip(dag.stages.tolist(), dag.ranks.tolist(), strict=True))
    if isinstance(model, BlockTimes):
        stage_to_rank = [rank_of[stage] for stage in range(n_stages)]
        return min_max_split(
            model.n_layers, stage_to_rank, time_load(model, stage_to_rank), min_layers
        )

    def work_ms(stage: int, n_layers: int) -> float:
        times = model.stage(stage, n_stages, n_layers)
        return times.forward_ms + times.backward_ms

    def load_with_one_more(stage: int) -> float:
        more_ms = work_ms(stage, split[stage] + 1) - work_ms(stage, split[stage])
        return load[rank_of[stage]] + more_ms

    load = dict.fromkeys(rank_of.values(), 0.0)
    for stage, n in enumerate(split):
        load[rank_of[stage]] += work_ms(stage, n)
    for _ in range(model.n_layers - sum(split)):
        # The least loaded rank, and on it the stage with the fewest layers.
        stage = min(range(n_stages), key=lambda s: (load_with_one_more(s), split[s]))
        load[rank_of[stage]] = load_with_one_more(stage)
        split[stage] += 1
    return tuple(split)
