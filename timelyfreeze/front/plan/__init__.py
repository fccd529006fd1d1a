"""Pipelines whose front is frozen: begun behind it, run ahead of, shrunk to fewer ranks.

``plan`` is PipeTransformer's AutoPipe, on the balances of ``balance``; ``run_ahead`` plays batches
whose frozen stages work on the next one; ``smartpipe`` has that paper's formulas. ``packing`` and
``communication`` are AutoFreeze's: larger batches in freed memory, and its model of replicas. Pure:
what moves layers in a running pipeline is not here.
"""

from timelyfreeze.front.plan.plan import (
    PARAMETERS,
    TIME,
    BatchPacking,
    ElasticPlan,
    efficiency_workers,
    elastic_plan,
    last_step,
    min_max_balance,
    paper_balance,
    performance_packing,
    replicas_of,
)
from timelyfreeze.front.plan.run_ahead import (
    RunAhead,
    behind_front,
    communication_ms,
    epoch_ms,
    run_ahead,
)

__all__ = [
    "PARAMETERS", "TIME", "BatchPacking", "ElasticPlan", "RunAhead", "behind_front",
    "communication_ms", "efficiency_workers", "elastic_plan", "epoch_ms", "last_step",
    "min_max_balance", "paper_balance", "performance_packing", "replicas_of", "run_ahead",
]  # fmt: skip
