"""The pipeline shrunk to fewer ranks, with more replicas: what a batch of the same rows takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from timelyfreeze.planning.elastic import (
    PARAMETERS,
    TIME,
    ElasticPlan,
    communication_ms,
    elastic_plan,
    replicas_of,
)
from timelyfreeze.schedule import ScheduleOrder, build_dag, gpipe_order
from timelyfreeze.whatif.answers import order_of
from timelyfreeze.whatif.fronts.times import front_times, layer_times
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.loads import loads_of_ranks, memory_load, parameter_load
from timelyfreeze.whatif.rank_memory import LAYER, ModelBytes, frozen_parts, parts_of, rank_memory
from timelyfreeze.whatif.schedule_cases import ScheduleCases
from timelyfreeze.whatif.times import unfrozen_batch_ms

# Replicas reduce gradients in float32. A GB/s is so many bytes a millisecond.
_GRADIENT_BYTES, _BYTES_PER_MS = 4, 1e6


@dataclass(frozen=True)
class Shrunk:
    """A pipeline shrunk to what is live.

    Attributes:
        partition: What was balanced: ``PARAMETERS`` or ``TIME``.
        plan: Ranks, layers of each, replicas and their microbatches.
        batch_ms: A batch of as many microbatches as before, without what replicas send each other.
        exchange_ms: What they send: float32 gradients of the live layers of the rank that has most
            of them, by ``communication_ms`` with a bucket for each layer. None where the bandwidth
            or the parameters are not told.
    """

    partition: str
    plan: ElasticPlan
    batch_ms: float
    exchange_ms: float | None


@dataclass(frozen=True)
class Shrinking:
    """A schedule that is to be shrunk.

    Attributes:
        table: The schedule.
        model: Overheads at which layers move.
        split: Layers of each stage at the start.
        partition: ``PARAMETERS`` or ``TIME``; None for the first if the file tells parameters.
    """

    table: ScheduleCases
    model: LayerModel
    split: Split
    partition: str | None

    def shrunk(self, n_frozen: int) -> Shrunk:
        """Return the pipeline that is left for the layers that are not frozen.

        Raises:
            ValueError: If ranks have several stages, the file does not tell parameters, a rank
                would have no layer, or times are out of the measurements' reach.
        """
        order, grid = self.table.order, self.table.grid
        if order.n_stages != order.n_ranks:
            raise ValueError("AutoPipe gives each rank one stage; this schedule has more")
        partition = self.partition or (
            TIME if self.table.file.notes.parameters is None else PARAMETERS
        )
        plan = self._by_time(n_frozen) if partition == TIME else self._by_parameters(n_frozen)
        dag = build_dag(self._order(plan.n_ranks, plan.n_microbatches))
        processors = grid.n_processors
        return Shrunk(
            partition,
            plan,
            unfrozen_batch_ms(
                dag,
                front_times(self.model, plan.split, n_frozen),
                # Replicas share what processors there are.
                None if processors is None else processors / plan.n_replicas,
                self.table.links,
            ),
            self._exchange_ms(plan, n_frozen),
        )

    def _exchange_ms(self, plan: ElasticPlan, n_frozen: int) -> float | None:
        grid, parameters = self.table.grid, self.table.file.notes.parameters
        if parameters is None or grid.link_gb_per_s is None:
            return None
        bytes_per_ms = _BYTES_PER_MS * grid.link_gb_per_s
        layers_ms = [
            communication_ms(
                1, _GRADIENT_BYTES * n, plan.n_replicas, bytes_per_ms, grid.p2p_overhead_ms
            )
            for n in parameters.units[n_frozen:]
        ]
        layers_ms = [0.0] * n_frozen + layers_ms
        ends = itertools.accumulate(plan.split, initial=0)
        return max(sum(layers_ms[a:b]) for a, b in itertools.pairwise(ends))

    def _by_parameters(self, n_frozen: int) -> ElasticPlan:
        notes, order = self.table.file.notes, self.table.order
        if notes.parameters is None:
            raise ValueError(
                f"{self.table.file.path.name} does not tell how many parameters the parts of the "
                f"model have; shrink by {TIME}"
            )
        load = parameter_load(notes.parameters, order.stage_to_rank)
        return elastic_plan(
            notes.parameters.units,
            n_frozen,
            order.n_ranks,
            largest_at_start=max(loads_of_ranks(load, self.split, order.stage_to_rank)),
            n_microbatches=self.table.n_microbatches,
        )

    def _by_time(self, n_frozen: int) -> ElasticPlan:
        order, memory = self.table.order, self.table.file.notes.memory
        at_start = self.model.times(self.split)
        fits = None
        if memory is not None:
            load = memory_load(memory, order)
            limit = max(loads_of_ranks(load, self.split, order.stage_to_rank))

            def fits(n_ranks: int, rank: int, start: int, stop: int) -> bool:
                return self._bytes(memory, n_frozen, n_ranks, rank, start, stop) <= limit

        return elastic_plan(
            layer_times(self.model, n_frozen),
            n_frozen,
            order.n_ranks,
            largest_at_start=max(times.forward_ms + times.backward_ms for times in at_start),
            n_microbatches=self.table.n_microbatches,
            partition=TIME,
            fits=fits,
        )

    def _bytes(
        self, model: ModelBytes, n_frozen: int, n_ranks: int, rank: int, start: int, stop: int
    ) -> int:
        """Return what a rank holds at its fullest that has layers ``start`` to ``stop`` - 1."""
        n_microbatches = self.table.n_microbatches
        n_microbatches //= replicas_of(self.table.order.n_ranks, n_ranks, n_microbatches)
        parts = parts_of(rank, n_ranks, stop - start)
        live, frozen = frozen_parts(parts, min(max(n_frozen - start, 0), parts[LAYER]))
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
