"""Pipelines to time solvers on: any schedule, durations with noise, as in ``docs/results.md``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning import FreezeLp, build_lp
from timelyfreeze.runtime import named_order, stages_per_rank
from timelyfreeze.schedule import PipelineDag, build_dag, makespan
from timelyfreeze.timing import DurationBounds

MAX_FREEZE_RATIO = 0.8


@dataclass(frozen=True, eq=False)
class Case:
    """A pipeline with durations.

    Attributes:
        schedule: Its name.
        n_ranks: Pipeline ranks.
        n_microbatches: Microbatches of a batch.
        dag: Its graph.
        bounds: Durations of its actions.
        lp: The program, with ``MAX_FREEZE_RATIO``.
    """

    schedule: str
    n_ranks: int
    n_microbatches: int
    dag: PipelineDag
    bounds: DurationBounds
    lp: FreezeLp

    def batch_ms(self, ratios: NDArray[np.float64]) -> float:
        """Return the batch time with these ratios.

        Args:
            ratios: Shape [R]; what a solver's tolerance puts outside of [0, 1] counts as 0 or 1.
        """
        durations = self.bounds.max_ms.copy()
        saved = (self.bounds.max_ms - self.bounds.min_ms)[self.lp.freezable]
        durations[self.lp.freezable] -= np.clip(ratios, 0.0, 1.0) * saved
        return makespan(self.dag, durations)


def schedule_dag(schedule: str, n_ranks: int, n_microbatches: int) -> PipelineDag:
    """Return the graph of a schedule with as few stages per rank as it can have."""
    n_stages = stages_per_rank(schedule)
    if n_stages is None:
        raise ValueError(f"{schedule!r} is no schedule that torch can build")
    return build_dag(named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages))


def noisy_durations(dag: PipelineDag, seed: int = 0, noise: float = 0.05) -> DurationBounds:
    """Make F, dX and dW equally long, up to noise.

    Frozen, a backward keeps dX, but for the first stage's, of which nothing is left. Without noise
    all microbatches are alike and very many plans equally good.

    Args:
        dag: Any pipeline.
        seed: Of the noise.
        noise: Its standard deviation, relative.
    """
    rng = np.random.default_rng(seed)
    kind = np.array([action.kind.value for action in dag.actions])
    longest = np.where(kind == "B", 2.0, 1.0) * rng.normal(1.0, noise, len(dag.actions))
    left = np.where((kind == "W") | (dag.stages == 0), 0.0, 0.5)
    return DurationBounds(np.where(dag.freezable, longest * left, longest), longest)


def make_case(
    schedule: str, n_ranks: int, n_microbatches: int, seed: int = 0, noise: float = 0.05
) -> Case:
    """Return a pipeline of ``schedule`` with noisy durations and its program."""
    dag = schedule_dag(schedule, n_ranks, n_microbatches)
    bounds = noisy_durations(dag, seed, noise)
    lp = build_lp(dag, bounds, MAX_FREEZE_RATIO)
    return Case(schedule, n_ranks, n_microbatches, dag, bounds, lp)
