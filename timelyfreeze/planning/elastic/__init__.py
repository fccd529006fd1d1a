"""Pipelines whose front is frozen: begun behind it, run ahead of, shrunk to fewer ranks.

``plan`` is PipeTransformer's AutoPipe, on the balances of ``balance``; ``run_ahead`` plays batches
whose frozen stages work on the next one; ``smartpipe`` has that paper's formulas. ``packing`` and
``communication`` are AutoFreeze's: larger batches in freed memory, and its model of replicas. Pure:
what moves layers in a running pipeline is not here.
"""

from timelyfreeze.planning.elastic.balance import min_max_balance, paper_balance
from timelyfreeze.planning.elastic.communication import communication_ms, epoch_ms
from timelyfreeze.planning.elastic.packing import (
    BatchPacking,
    efficiency_workers,
    last_step,
    performance_packing,
)
from timelyfreeze.planning.elastic.plan import (
    PARAMETERS,
    TIME,
    ElasticPlan,
    elastic_plan,
    replicas_of,
)
from timelyfreeze.planning.elastic.run_ahead import RunAhead, behind_front, run_ahead

__all__ = [
    "PARAMETERS", "TIME", "BatchPacking", "ElasticPlan", "RunAhead", "behind_front",
    "communication_ms", "efficiency_workers", "elastic_plan", "epoch_ms", "last_step",
    "min_max_balance", "paper_balance", "performance_packing", "replicas_of", "run_ahead",
]  # fmt: skip
