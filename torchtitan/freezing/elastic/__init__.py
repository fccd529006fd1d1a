"""What a run does with the ranks of a frozen front: fewer of them, larger batches, the next one."""

from torchtitan.freezing.elastic.ahead import RunningAhead, running_ahead
from torchtitan.freezing.elastic.part import RunPart, in_parts, present_config
from torchtitan.freezing.elastic.run import ElasticRun

__all__ = [
    "ElasticRun", "RunPart", "RunningAhead", "in_parts", "present_config", "running_ahead",
]  # fmt: skip
