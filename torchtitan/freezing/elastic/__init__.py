"""A pipeline that becomes shorter as the front of the model freezes, while a run goes on."""

from torchtitan.freezing.elastic.run import ElasticRun

__all__ = ["ElasticRun"]
