"""Pipelines whose front is frozen: begun behind it, run ahead of, shrunk to fewer ranks.

``plan`` has PipeTransformer's AutoPipe and its balances, and AutoFreeze's larger batches in freed
memory; ``run_ahead`` plays batches whose frozen stages work on the next one, and has AutoFreeze's
model of replicas. Pure: what moves layers in a running pipeline is not here.
"""

from timelyfreeze.front.plan.plan import (
    PARAMETERS,
    TIME,
    BatchPacking,
    ElasticPlan,
    elastic_plan,
    last_step,
    min_max_balance,
    performance_packing,
    replicas_of,
)
from timelyfreeze.front.plan.run_ahead import behind_front, communication_ms, run_ahead
