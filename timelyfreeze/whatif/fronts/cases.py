"""What a frozen front brings: alone, with a cache, re-split, run ahead of, shrunk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from timelyfreeze.front.plan import (
    PARAMETERS,
    TIME,
    ElasticPlan,
    behind_front,
    communication_ms,
    elastic_plan,
    min_max_balance,
    replicas_of,
    run_ahead,
)
from timelyfreeze.schedule import ScheduleOrder, build_dag, gpipe_order
from timelyfreeze.whatif.answers import order_of, schedules_of, sorted_out
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.fronts.times import front_times, layer_times, stages_in_front
from timelyfreeze.whatif.grid import BEST_SPLIT, Grid, Split, render_split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.loads import loads_of_ranks, memory_load, parameter_load, shortest_split
from timelyfreeze.whatif.partition import Load
from timelyfreeze.whatif.rank_memory import LAYER, ModelBytes, frozen_parts, parts_of, rank_memory
from timelyfreeze.whatif.schedule_cases import ScheduleCases, first_line
from timelyfreeze.whatif.times import StageTimes, bounds_from_times, unfrozen_batch_ms

# Replicas reduce gradients in float32. A GB/s is so many bytes a millisecond.
_GRADIENT_BYTES, _BYTES_PER_MS = 4, 1e6


@dataclass(frozen=True)
class Shrunk:
    """A pipeline shrunk to what is live."""

    partition: str  # what was balanced: ``PARAMETERS`` or ``TIME``
    plan: ElasticPlan  # ranks, layers of each, replicas and their microbatches
    # A batch of as many microbatches as before, without what replicas send each other.
    batch_ms: float
    # What they send: float32 gradients of the live layers of the rank that has most of them, by
    # ``communication_ms`` with a bucket for each layer. None where the bandwidth or the parameters
    # are not told.
    exchange_ms: float | None


# Up to so many actions in all, every split is played.
_MAX_ACTIONS_OF_ALL = 100_000


@dataclass(frozen=True)
class FrontCase:
    """One schedule with the first layers frozen; milliseconds of a batch."""

    schedule: str  # name of the schedule
    n_microbatches: int  # microbatches of a batch
    split: str  # its name, as asked for
    layers: Split  # layers of each stage
    n_frozen: int  # how many layers in front are frozen, and the embedding with them
    unfrozen_ms: float  # nothing frozen
    frozen_ms: float  # frozen, and nothing else done
    cached_ms: float  # begun behind the front; reading is not in it
    resplit_layers: Split  # the split found for the frozen model
    resplit_ms: float  # frozen, with that split
    # Frozen, with stages wholly in front one batch ahead; None where there is no such stage.
    run_ahead_ms: float | None
    shrunk: Shrunk | None  # on fewer ranks, with more replicas; None where that is left out


@dataclass(frozen=True)
class FrontAnswer:
    """The cases of frozen fronts, and notes on them."""

    cases: tuple[FrontCase, ...]
    notes: tuple[str, ...]


def answer_fronts(
    file: BoundsFile,
    grid: Grid,
    frozen: Sequence[int],
    *,
    partition: str | None = None,
    layers: Split | None = None,
) -> FrontAnswer:
    """Work out what frozen layers bring in every schedule, number of microbatches and split.

    ``frozen`` are numbers of layers, ``partition`` is what a shrunk pipeline balances: None for
    parameters if the file tells them, else time. Other arguments are those of ``answer``; what
    belongs to plans alone is not looked at.

    Raises:
        ValueError: If no case can be built, layers cannot be told apart, or ``layers`` contradicts
            the file.
    """
    tables, notes = schedules_of(file, grid, layers)

    def found() -> Iterator[FrontCase | str]:
        for table, name in itertools.product(tables, grid.splits):
            title = name if isinstance(name, str) else render_split(name)
            try:
                split = table.split_of(name, table.best_unfrozen() if name == BEST_SPLIT else None)
                yield from _cases(table, split, title, frozen, partition)
            except ValueError as error:
                yield table.left_out(title, error)

    return FrontAnswer(sorted_out(found(), notes), (*notes,))


def _cases(
    table: ScheduleCases, split: Split | None, title: str, frozen: Sequence[int],
    partition: str | None,
) -> Iterator[FrontCase | str]:  # fmt: skip
    """Yield the cases of a split, and notes on what is left out of them."""
    if table.model is None or split is None:
        raise ValueError("layers cannot be told apart, so none can be frozen")
    if not isinstance(table.model, LayerModel):
        raise ValueError("layers differ; a front is worked out for layers that are alike")
    for n_frozen in frozen:
        front = _Front(table, table.model, split, n_frozen)
        shrunk = None
        try:
            shrunk = front.shrunk(partition)
        except ValueError as error:
            yield f"left out shrinking of {table.schedule}: {first_line(error)}"
        try:
            yield front.case(title, shrunk)
        except ValueError as error:
            yield table.left_out(f"{title}, {n_frozen} frozen layers", error)


@dataclass(frozen=True)
class _Front:
    """A schedule and a split whose first layers are frozen."""

    table: ScheduleCases
    model: LayerModel  # overheads at which layers move
    split: Split
    n_frozen: int

    def case(self, title: str, shrunk: Shrunk | None) -> FrontCase:
        table, n_frozen = self.table, self.n_frozen
        times = front_times(self.model, self.split, n_frozen)
        cached = front_times(self.model, self.split, n_frozen, cached=True)
        n_front = stages_in_front(self.split, n_frozen)
        resplit, resplit_ms = self._resplit()
        return FrontCase(
            schedule=table.schedule,
            n_microbatches=table.n_microbatches,
            split=title,
            layers=self.split,
            n_frozen=n_frozen,
            unfrozen_ms=self._batch_ms(self.model.times(self.split)),
            frozen_ms=self._batch_ms(times),
            cached_ms=unfrozen_batch_ms(
                behind_front(table.order, n_front), cached, table.grid.n_processors, table.links
            ),
            resplit_layers=resplit,
            resplit_ms=resplit_ms,
            run_ahead_ms=self._run_ahead_ms(times, n_front) if n_front else None,
            shrunk=shrunk,
        )

    def _batch_ms(self, times: Sequence[StageTimes]) -> float:
        table = self.table
        return unfrozen_batch_ms(table.dag, times, table.grid.n_processors, table.links)

    def _run_ahead_ms(self, times: Sequence[StageTimes], n_front: int) -> float:
        links = self.table.links
        batches = run_ahead(self.table.order, n_front)
        dag = batches.dag
        return batches.batch_ms(
            bounds_from_times(dag, times).max_ms + links.lead_ms(dag),
            self.table.grid.n_processors,
            np.where(batches.within_batch, links.delays_ms(dag), 0.0),
        )

    def _resplit(self) -> tuple[Split, float]:
        """Return the split with the shortest batch, and that batch."""
        model, dag = self.model, self.table.dag
        min_layers = model.least_layers(dag.n_stages)
        n_free = model.n_layers - sum(min_layers)
        n_splits = math.comb(n_free + dag.n_stages - 1, dag.n_stages - 1)

        def batch_ms(split: Split) -> float:
            try:
                return self._batch_ms(front_times(model, split, self.n_frozen))
            except ValueError:  # out of the measurements' reach: no split to take
                return math.inf

        if n_splits * len(dag.actions) <= _MAX_ACTIONS_OF_ALL:
            best_ms, best = min((batch_ms(split), split) for split in _all(min_layers, n_free))
            own_ms = batch_ms(self.split)
            return (self.split, own_ms) if own_ms <= best_ms else (best, best_ms)
        starts = [self.split]
        if even := min_max_balance(layer_times(model, self.n_frozen), dag.n_stages):
            starts.append(even[0])
        best = shortest_split(starts, min_layers, batch_ms, n_actions=len(dag.actions))
        return best, batch_ms(best)

    def shrunk(self, partition: str | None) -> Shrunk:
        """Return the pipeline that is left for the layers that are not frozen.

        ``partition`` is ``PARAMETERS`` or ``TIME``; None for the first if the file tells them.

        Raises:
            ValueError: If ranks have several stages, the file does not tell parameters, a rank
                would have no layer, or times are out of the measurements' reach.
        """
        order, grid, notes = self.table.order, self.table.grid, self.table.file.notes
        if order.n_stages != order.n_ranks:
            raise ValueError("AutoPipe gives each rank one stage; this schedule has more")
        partition = partition or (TIME if notes.parameters is None else PARAMETERS)
        plan = self._by_time() if partition == TIME else self._by_parameters()
        # Replicas share what processors there are.
        processors = None if grid.n_processors is None else grid.n_processors / plan.n_replicas
        batch_ms = unfrozen_batch_ms(
            build_dag(self._order(plan.n_ranks, plan.n_microbatches)),
            front_times(self.model, plan.split, self.n_frozen),
            processors,
            self.table.links,
        )
        return Shrunk(partition, plan, batch_ms, self._exchange_ms(plan))

    def _exchange_ms(self, plan: ElasticPlan) -> float | None:
        grid, parameters = self.table.grid, self.table.file.notes.parameters
        if parameters is None or grid.link_gb_per_s is None:
            return None
        speed = _BYTES_PER_MS * grid.link_gb_per_s
        layers_ms = [0.0] * self.n_frozen + [
            communication_ms(1, _GRADIENT_BYTES * n, plan.n_replicas, speed, grid.p2p_overhead_ms)
            for n in parameters.units[self.n_frozen :]
        ]
        ends = itertools.accumulate(plan.split, initial=0)
        return max(sum(layers_ms[a:b]) for a, b in itertools.pairwise(ends))

    def _largest_at_start(self, load: Load) -> int:
        stage_to_rank = self.table.order.stage_to_rank
        return max(loads_of_ranks(load, self.split, stage_to_rank))

    def _by_parameters(self) -> ElasticPlan:
        parameters, order = self.table.file.notes.parameters, self.table.order
        if parameters is None:
            raise ValueError(
                f"{self.table.file.path.name} does not tell how many parameters the parts of the "
                f"model have; shrink by {TIME}"
            )
        return elastic_plan(
            parameters.units,
            self.n_frozen,
            order.n_ranks,
            largest_at_start=self._largest_at_start(
                parameter_load(parameters, order.stage_to_rank)
            ),
            n_microbatches=self.table.n_microbatches,
        )

    def _by_time(self) -> ElasticPlan:
        order, memory, fits = self.table.order, self.table.file.notes.memory, None
        if memory is not None:
            limit = self._largest_at_start(memory_load(memory, order))

            def fits(n_ranks: int, rank: int, start: int, stop: int) -> bool:
                return self._bytes(memory, n_ranks, rank, start, stop) <= limit

        at_start = self.model.times(self.split)
        return elastic_plan(
            layer_times(self.model, self.n_frozen),
            self.n_frozen,
            order.n_ranks,
            largest_at_start=max(times.forward_ms + times.backward_ms for times in at_start),
            n_microbatches=self.table.n_microbatches,
            partition=TIME,
            fits=fits,
        )

    def _bytes(self, model: ModelBytes, n_ranks: int, rank: int, start: int, stop: int) -> int:
        """Return what a rank holds at its fullest that has layers ``start`` to ``stop`` - 1."""
        n_microbatches = self.table.n_microbatches
        n_microbatches //= replicas_of(self.table.order.n_ranks, n_ranks, n_microbatches)
        parts = parts_of(rank, n_ranks, stop - start)
        live, frozen = frozen_parts(parts, min(max(self.n_frozen - start, 0), parts[LAYER]))
        return rank_memory(
            model,
            {rank: live},
            self._order(n_ranks, n_microbatches).ranks[rank],
            n_stages=n_ranks,
            n_microbatches=n_microbatches,
            frozen=frozen,
        ).total

    def _order(self, n_ranks: int, n_microbatches: int) -> ScheduleOrder:
        if n_ranks == 1:
            # One rank does all of a microbatch, in whatever order.
            return gpipe_order(1, n_microbatches)
        return order_of(self.table.schedule, n_ranks, n_ranks, n_microbatches)


def _all(min_layers: Split, n_free: int) -> Iterator[Split]:
    """Yield every way to hand out ``n_free`` layers on top of the fewest ones."""
    n = len(min_layers)
    for bars in itertools.combinations(range(n_free + n - 1), n - 1):
        ends = [-1, *bars, n_free + n - 1]
        more = [b - a - 1 for a, b in itertools.pairwise(ends)]
        yield tuple(least + extra for least, extra in zip(min_layers, more, strict=True))
