"""Programs for the tests of the solvers: pipelines of every schedule, durations of every sort."""

import numpy as np

from tests.timelyfreeze.helpers.pipelines import random_bounds, random_order
from timelyfreeze.runtime.torch_pipelining import named_order
from timelyfreeze.schedule.dag import PipelineDag, build_dag
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
CAPS = [0.0, 0.1, 0.5, 0.8, 1.0]


def scheduled(name: str, n_ranks: int, n_microbatches: int) -> PipelineDag:
    return build_dag(named_order(name, n_ranks, n_microbatches, stages_per_rank=SCHEDULES[name]))


def noisy_bounds(dag: PipelineDag, seed: int, noise: float = 0.05) -> DurationBounds:
    """F = dX = dW up to noise; nothing is left of the first stage's backward when it is frozen.

    Of a split backward, I keeps dX and W is dW.
    """
    rng = np.random.default_rng(seed)
    kinds = np.array([action.kind.value for action in dag.actions])
    longest = np.where(kinds == "B", 2.0, 1.0) * rng.normal(1.0, noise, len(dag.actions))
    left = np.where((dag.stages == 0) | (kinds == "W"), 0.0, 0.5)
    return DurationBounds(np.where(dag.freezable, longest * left, longest), longest)


def equal_bounds(dag: PipelineDag) -> DurationBounds:
    """All actions of a kind alike, so that very many plans are equally good."""
    return uniform_bounds(
        dag, forward_ms=1.0, backward_ms=(1.0, 2.0), input_ms=1.0, weight_ms=(0.0, 1.0)
    )


def random_program(seed: int) -> tuple[PipelineDag, DurationBounds, list[float]]:
    """Any order that can run; savings of none, some and all of an action; a cap for each stage."""
    dag = build_dag(random_order(seed))
    rng = np.random.default_rng(seed)
    return dag, random_bounds(dag, seed), rng.choice(CAPS, dag.n_stages).tolist()
