"""Pipelines with a frozen front: begun behind the front, run ahead of, shrunk.

``plan`` has PipeTransformer's AutoPipe and its balances, and AutoFreeze's larger batches in freed
memory; ``run_ahead`` simulates batches with frozen stages at work on the next batch, and has
AutoFreeze's model of replicas. Pure functions: no running pipeline is changed here.
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
