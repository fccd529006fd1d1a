"""What a run does with the ranks of a frozen front: a shorter pipeline, or the next batch."""

from torchtitan.freezing.elastic.ahead import RunningAhead, running_ahead
from torchtitan.freezing.elastic.run import ElasticRun

__all__ = ["ElasticRun", "RunningAhead", "running_ahead"]
