"""What a frozen front brings: alone, with a cache, re-split, run ahead of, shrunk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from timelyfreeze.planning.elastic import behind_front, min_max_balance, run_ahead
from timelyfreeze.whatif.answers import nothing_planned, schedules_of
from timelyfreeze.whatif.best_unfrozen import shortest_split
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.fronts.shrink import Shrinking, Shrunk
from timelyfreeze.whatif.fronts.times import front_times, layer_times, stages_in_front
from timelyfreeze.whatif.grid import BEST_SPLIT, Grid, Split, render_split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.schedule_cases import ScheduleCases, first_line
from timelyfreeze.whatif.times import StageTimes, bounds_from_times, unfrozen_batch_ms

# Up to so many actions in all, every split is played.
_MAX_ACTIONS_OF_ALL = 100_000


@dataclass(frozen=True)
class FrontCase:
    """One schedule with the first layers frozen; milliseconds of a batch.

    Attributes:
        schedule: Name of the schedule.
        n_microbatches: Microbatches of a batch.
        split: Its name, as asked for.
        layers: Layers of each stage.
        n_frozen: How many layers in front are frozen, and the embedding with them.
        unfrozen_ms: Nothing frozen.
        frozen_ms: Frozen, and nothing else done.
        cached_ms: Begun behind the front; reading is not in it.
        resplit_layers: The split found for the frozen model.
        resplit_ms: Frozen, with that split.
        run_ahead_ms: Frozen, with stages wholly in front one batch ahead; None where there is no
            such stage.
        shrunk: On fewer ranks, with more replicas; None where that is left out.
    """

    schedule: str
    n_microbatches: int
    split: str
    layers: Split
    n_frozen: int
    unfrozen_ms: float
    frozen_ms: float
    cached_ms: float
    resplit_layers: Split
    resplit_ms: float
    run_ahead_ms: float | None
    shrunk: Shrunk | None


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

    Args:
        file: What was measured.
        grid: What to ask; its caps and what else belongs to plans is not looked at.
        frozen: Numbers of frozen layers.
        partition: What a shrunk pipeline balances; None for parameters if the file tells them,
            else time.
        layers: Layers of each measured stage, if the file does not say.

    Raises:
        ValueError: If no case can be built, layers cannot be told apart, or ``layers`` contradicts
            the file.
    """
    tables, notes = schedules_of(file, grid, layers)
    cases: list[FrontCase] = []
    for table, name in itertools.product(tables, grid.splits):
        title = name if isinstance(name, str) else render_split(name)
        try:
            found = list(_cases(table, name, title, frozen, partition))
        except ValueError as error:
            found = [table.left_out(title, error)]
        for one in found:
            if isinstance(one, FrontCase):
                cases.append(one)
            elif one not in notes:
                notes.append(one)
    if not cases:
        raise nothing_planned(notes)
    return FrontAnswer(tuple(cases), tuple(notes))


def _cases(
    table: ScheduleCases,
    name: str | Split,
    title: str,
    frozen: Sequence[int],
    partition: str | None,
) -> Iterator[FrontCase | str]:
    """Yield the cases of a split, and notes on what is left out of them."""
    split = table.split_of(name, table.best_unfrozen() if name == BEST_SPLIT else None)
    if table.model is None or split is None:
        raise ValueError("layers cannot be told apart, so none can be frozen")
    if not isinstance(table.model, LayerModel):
        raise ValueError("layers differ; a front is worked out for layers that are alike")
    front = _Front(table, table.model, split)
    for n_frozen in frozen:
        shrunk = None
        try:
            shrunk = Shrinking(table, table.model, split, partition).shrunk(n_frozen)
        except ValueError as error:
            yield f"left out shrinking of {table.schedule}: {first_line(error)}"
        try:
            yield front.case(title, n_frozen, shrunk)
        except ValueError as error:
            yield table.left_out(f"{title}, {n_frozen} frozen layers", error)


@dataclass(frozen=True)
class _Front:
    """A schedule and a split whose first layers are frozen."""

    table: ScheduleCases
    model: LayerModel
    split: Split

    def case(self, title: str, n_frozen: int, shrunk: Shrunk | None) -> FrontCase:
        table = self.table
        times = front_times(self.model, self.split, n_frozen)
        cached = front_times(self.model, self.split, n_frozen, cached=True)
        n_front = stages_in_front(self.split, n_frozen)
        resplit, resplit_ms = self._resplit(n_frozen)
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

    def _resplit(self, n_frozen: int) -> tuple[Split, float]:
        """Return the split with the shortest batch, and that batch."""
        model, dag = self.model, self.table.dag
        min_layers = model.least_layers(dag.n_stages)
        n_free = model.n_layers - sum(min_layers)
        n_splits = math.comb(n_free + dag.n_stages - 1, dag.n_stages - 1)

        def batch_ms(split: Split) -> float:
            try:
                return self._batch_ms(front_times(model, split, n_frozen))
            except ValueError:  # out of the measurements' reach: no split to take
                return math.inf

        if n_splits * len(dag.actions) <= _MAX_ACTIONS_OF_ALL:
            best_ms, best = min((batch_ms(split), split) for split in _all(min_layers, n_free))
            own_ms = batch_ms(self.split)
            return (self.split, own_ms) if own_ms <= best_ms else (best, best_ms)
        starts = [self.split]
        if even := min_max_balance(layer_times(model, n_frozen), dag.n_stages):
            starts.append(even[0])
        best = shortest_split(starts, min_layers, batch_ms, n_actions=len(dag.actions))
        return best, batch_ms(best)


def _all(min_layers: Split, n_free: int) -> Iterator[Split]:
    """Yield every way to hand out ``n_free`` layers on top of the fewest ones."""
    n = len(min_layers)
    for bars in itertools.combinations(range(n_free + n - 1), n - 1):
        ends = [-1, *bars, n_free + n - 1]
        more = [b - a - 1 for a, b in itertools.pairwise(ends)]
        yield tuple(least + extra for least, extra in zip(min_layers, more, strict=True))
