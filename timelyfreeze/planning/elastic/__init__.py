"""Pipelines whose front is frozen: begun behind it, run ahead of, shrunk to fewer ranks.

``plan`` is PipeTransformer's AutoPipe, on the balances of ``balance``; ``run_ahead`` plays batches
whose frozen stages work on the next one; ``smartpipe`` has that paper's formulas. Pure: what moves
layers in a running pipeline is not here.
"""

from timelyfreeze.planning.elastic.balance import min_max_balance, paper_balance
from timelyfreeze.planning.elastic.plan import (
    PARAMETERS,
    TIME,
    ElasticPlan,
    elastic_plan,
    replicas_of,
)
from timelyfreeze.planning.elastic.run_ahead import RunAhead, behind_front, run_ahead

__all__ = [
    "PARAMETERS",
    "TIME",
    "ElasticPlan",
    "RunAhead",
    "behind_front",
    "elastic_plan",
    "min_max_balance",
    "paper_balance",
    "replicas_of",
    "run_ahead",
]
