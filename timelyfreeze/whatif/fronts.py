"""What if the first layers were frozen for good: alone, cached, re-split, run ahead of, shrunk."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from timelyfreeze.schedule import PipelineDag, ScheduleOrder, build_dag, gpipe_order
from timelyfreeze.whatif.answers import (
    ScheduleCases,
    first_line,
    order_of,
    schedules_of,
    sorted_out,
)
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.grid import Answer, Grid, Split, layers_of_split, render_split
from timelyfreeze.whatif.layer_model import LayerModel, check_possible
from timelyfreeze.whatif.partition import (
    memory_load,
    parameter_load,
    shortest_split,
)
from timelyfreeze.whatif.rank_memory import cut_memory
from timelyfreeze.whatif.times import StageTimes, bounds_from_times, unfrozen_batch_ms


def stages_in_front(split: Sequence[int], n_frozen: int) -> int:
    """Return the number of stages frozen whole; never the last, with the head."""
    before = layers_of_split(split[:-1])
    return sum(layers.stop <= n_frozen for layers in before) if n_frozen else 0


def front_times(
    model: LayerModel, split: Sequence[int], n_frozen: int, *, cached: bool = False
) -> tuple[StageTimes, ...]:
    """Return the stage times of a split; a split of a single stage is the whole model.

    With ``cached`` outputs the front's forward falls away too.
    """
    if not 0 < n_frozen < model.n_layers:
        raise ValueError(
            f"{n_frozen} layers of {model.n_layers} would be frozen; it must be 1 or more, and "
            "leave one live"
        )
    if len(split) == 1:  # has both ends of the model
        first, last = model.stage(0, 2, model.n_layers), model.stage(1, 2, 0)
        whole: tuple[StageTimes, ...] = (first.plus(last).plus(model.fixed, -1.0),)
    else:
        whole = model.times(split)
    n_front = stages_in_front(split, n_frozen)
    front, there, behind = whole[:n_front], whole[n_front], whole[n_front + 1 :]
    times = [StageTimes(forward_ms=0.0 if cached else each.forward_ms) for each in front]
    live = _live_part(model, n_front, len(split), sum(split[: n_front + 1]) - n_frozen)
    forward_ms = live.forward_ms if cached else there.forward_ms
    # As in a first stage: nobody waits for an input gradient, so W does all of it.
    times += [StageTimes(forward_ms, live.backward_ms, weight_ms=live.backward_ms), *behind]
    check_possible(times, f"{n_frozen} frozen layers of the split {render_split(split)} are")
    return tuple(times)


def layer_times(model: LayerModel, n_frozen: int) -> list[float]:
    """Return the layers' times in a microbatch, forward and backward, milliseconds.

    Embedding and head count with the first and the last layer, frozen layers with their forward.
    """
    layer, fixed = model.layer, model.fixed
    first, last = model.stage(0, 2, 0), model.stage(1, 2, 0)
    times = [layer.forward_ms] * n_frozen
    times += [layer.forward_ms + layer.backward_ms] * (model.n_layers - n_frozen)
    times[0] += max(first.forward_ms - fixed.forward_ms, 0.0)
    beyond = last.plus(fixed, -1.0)
    times[-1] += max(beyond.forward_ms + beyond.backward_ms, 0.0)
    return times


def _live_part(model: LayerModel, stage: int, n_stages: int, n_live: int) -> StageTimes:
    """Return the time of the live layers in the front's last stage."""
    if n_stages == 1:
        return model.stage(1, 2, n_live)
    there = model.stage(stage, n_stages, n_live)
    if stage > 0:
        return there
    # The embedding is frozen too. Where noise says that it takes less than nothing, it takes that.
    without = model.fixed.plus(model.layer, n_live)
    return StageTimes(
        min(there.forward_ms, without.forward_ms), min(there.backward_ms, without.backward_ms)
    )


# Replicas reduce gradients in float32. A GB/s is so many bytes a millisecond.
_GRADIENT_BYTES, _BYTES_PER_MS = 4, 1e6


# Up to so many actions in all, every split is played.
_MAX_ACTIONS_OF_ALL = 100_000


@dataclass(frozen=True)
class FrontCase:
    """A schedule with the first layers frozen; milliseconds of a batch."""

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
    # The pipeline shrunk to what is live; None where that is left out.
    shrunk_partition: str | None = None  # what was balanced: ``PARAMETERS`` or ``TIME``
    shrunk_ranks: int | None = None  # ranks of a replica
    shrunk_replicas: int | None = None  # number of replicas
    shrunk_microbatches: int | None = None  # microbatches of each
    shrunk_layers: Split | None = None  # layers of each rank
    # A batch of as many microbatches as before, without what replicas send each other.
    shrunk_ms: float | None = None
    # What they send: float32 gradients of the live layers of the rank that has most of them, by
    # ``communication_ms`` with a bucket for each layer. None where the bandwidth or the parameters
    # are not told.
    exchange_ms: float | None = None


def answer_fronts(
    file: BoundsFile,
    grid: Grid,
    frozen: Sequence[int],
    *,
    partition: str | None = None,
    layers: Split | None = None,
) -> Answer[FrontCase]:
    """Compute the gains of frozen layers by schedule, number of microbatches and split.

    ``frozen`` are numbers of layers; a shrunk pipeline balances ``partition``, or parameters if
    known to the file, else time. Settings of plans alone are ignored.
    """
    tables, notes = schedules_of(file, grid, layers)

    def found() -> Iterator[FrontCase | str]:
        for table, name in itertools.product(tables, grid.splits):
            title = name if isinstance(name, str) else render_split(name)
            try:
                split = table.split_of(name)
                yield from _cases(table, split, title, frozen, partition)
            except ValueError as error:
                yield table.left_out(title, error)

    return sorted_out(found(), notes)


def _cases(
    table: ScheduleCases, split: Split | None, title: str, frozen: Sequence[int],
    partition: str | None,
) -> Iterator[FrontCase | str]:  # fmt: skip
    """Yield the cases of a split, and notes on omissions."""
    if table.model is None or split is None:
        raise ValueError("layers cannot be told apart, so none can be frozen")
    if not isinstance(table.model, LayerModel):
        raise ValueError("layers differ; a front is worked out for layers that are alike")
    for n_frozen in frozen:
        front = _Front(table, table.model, split, n_frozen)
        shrunk: Mapping[str, Any] = {}
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

    def case(self, title: str, shrunk: Mapping[str, Any]) -> FrontCase:
        table, n_frozen = self.table, self.n_frozen
        times = front_times(self.model, self.split, n_frozen)
        cached = front_times(self.model, self.split, n_frozen, cached=True)
        n_front = stages_in_front(self.split, n_frozen)
        resplit, resplit_ms = self._resplit()
        return FrontCase(
            schedule=table.schedule,
            n_microbatches=table.order.n_microbatches,
            split=title,
            layers=self.split,
            n_frozen=n_frozen,
            unfrozen_ms=self._batch_ms(self.model.times(self.split)),
            frozen_ms=self._batch_ms(times),
            cached_ms=self._batch_ms(cached, behind_front(table.order, n_front)),
            resplit_layers=resplit,
            resplit_ms=resplit_ms,
            run_ahead_ms=self._run_ahead_ms(times, n_front) if n_front else None,
            **shrunk,
        )

    def _batch_ms(self, times: Sequence[StageTimes], dag: PipelineDag | None = None) -> float:
        table = self.table
        return unfrozen_batch_ms(dag or table.dag, times, table.grid.n_processors, table.links)

    def _run_ahead_ms(self, times: Sequence[StageTimes], n_front: int) -> float:
        batches = run_ahead(self.table.order, n_front)
        bounds = bounds_from_times(batches.dag, times, self.table.links)
        delays_ms = np.where(batches.within_batch, bounds.delays_ms(batches.dag), 0.0)
        return batches.batch_ms(bounds.max_ms, self.table.grid.n_processors, delays_ms)

    def _resplit(self) -> tuple[Split, float]:
        """Return the split with the shortest batch, and the batch."""
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

    def shrunk(self, partition: str | None) -> dict[str, Any]:
        """Return a case's values of the shrunk pipeline; by parameters, if known, else by time."""
        order, grid, notes = self.table.order, self.table.grid, self.table.file.metadata
        if order.n_stages != order.n_ranks:
            raise ValueError("AutoPipe gives each rank one stage; this schedule has more")
        partition = partition or (TIME if notes.parameters is None else PARAMETERS)
        plan = self._plan(partition)
        # Replicas share what processors there are.
        processors = None if grid.n_processors is None else grid.n_processors / plan.n_replicas
        batch_ms = unfrozen_batch_ms(
            build_dag(self._order(plan.n_ranks, plan.n_microbatches)),
            front_times(self.model, plan.split, self.n_frozen),
            processors,
            self.table.links,
        )
        return {
            "shrunk_partition": partition,
            "shrunk_ranks": plan.n_ranks,
            "shrunk_replicas": plan.n_replicas,
            "shrunk_microbatches": plan.n_microbatches,
            "shrunk_layers": plan.split,
            "shrunk_ms": batch_ms,
            "exchange_ms": self._exchange_ms(plan),
        }

    def _exchange_ms(self, plan: ElasticPlan) -> float | None:
        grid, parameters = self.table.grid, self.table.file.metadata.parameters
        if parameters is None or grid.link_gb_per_s is None:
            return None
        speed = _BYTES_PER_MS * grid.link_gb_per_s
        layers_ms = [0.0] * self.n_frozen + [
            communication_ms(1, _GRADIENT_BYTES * n, plan.n_replicas, speed, grid.p2p_overhead_ms)
            for n in parameters.units[self.n_frozen :]
        ]
        ranks = layers_of_split(plan.split)
        return max(sum(layers_ms[i] for i in layers) for layers in ranks)

    def _plan(self, partition: str) -> ElasticPlan:
        table, order, notes = self.table, self.table.order, self.table.file.metadata
        memory, fits = notes.memory, None
        if partition == TIME:
            loads: Sequence[float] = layer_times(self.model, self.n_frozen)
            largest = max(t.forward_ms + t.backward_ms for t in self.model.times(self.split))
            if memory is not None:
                limit = max(memory_load(memory, order).of_split(self.split))

                def fits(n_ranks: int, rank: int, start: int, stop: int) -> bool:
                    n = order.n_microbatches
                    shorter = self._order(n_ranks, n // replicas_of(order.n_ranks, n_ranks, n))
                    found = cut_memory(memory, shorter, rank, start, stop, self.n_frozen)
                    return found.total <= limit

        elif notes.parameters is None:
            raise ValueError(
                f"{table.file.path.name} does not tell how many parameters the parts of the "
                f"model have; shrink by {TIME}"
            )
        else:
            loads = notes.parameters.units
            load = parameter_load(notes.parameters, order.stage_to_rank)
            largest = max(load.of_split(self.split))
        return elastic_plan(
            loads, self.n_frozen, order.n_ranks, largest_at_start=largest,
            n_microbatches=table.order.n_microbatches, partition=partition, fits=fits,
        )  # fmt: skip

    def _order(self, n_ranks: int, n_microbatches: int) -> ScheduleOrder:
        if n_ranks == 1:
            # One rank does all of a microbatch, in whatever order.
            return gpipe_order(1, n_microbatches)
        return order_of(self.table.schedule, n_ranks, n_ranks, n_microbatches)


def _all(min_layers: Split, n_free: int) -> Iterator[Split]:
    """Yield every way to hand out ``n_free`` layers on top of the fewest ones."""
    for takers in itertools.combinations_with_replacement(range(len(min_layers)), n_free):
        yield tuple(least + takers.count(stage) for stage, least in enumerate(min_layers))
