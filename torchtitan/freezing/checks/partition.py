"""Finds partitions that nobody knows, that lack what they need, or that other keys contradict."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.whatif.loads import PARTITIONS, TIME
from torchtitan.freezing.config import JobConfig

_KEY = "parallelism.partition"
_NEEDS_PROFILE = (
    "needs parallelism.partition_profile: a bounds.json that `timelyfreeze profile` or a training "
    "run has written"
)
# Other ways to say where a model is cut.
_CUTS = (
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.pipeline_parallel_layers_per_stage",
)


def partition_errors(config: JobConfig, given: Collection[str] = ()) -> Iterator[str]:
    """Say what is wrong with the partition that is asked for: key, value and rule.

    Args:
        config: The configuration.
        given: Keys that stand in the file or on the command line, where it was just read.
    """
    partition, degree = config.parallelism.partition, config.parallelism.pipeline_parallel_degree
    profile, freezing = config.parallelism.partition_profile, config.freezing
    if freezes_by_turns(freezing.method) and freezing.elastic.is_by_time and not profile:
        yield f"freezing.elastic.partition is {TIME!r}, which {_NEEDS_PROFILE}"
    if not partition:
        return
    if partition not in PARTITIONS:
        yield f"{_KEY} is {partition!r}; known: {', '.join(PARTITIONS)}"
        return
    if degree <= 1:
        yield (
            f"{_KEY} is {partition!r}, which needs parallelism.pipeline_parallel_degree of 2 or "
            f"more; it is {degree}"
        )
    if partition == TIME and not profile:
        yield f"{_KEY} is {partition!r}, which {_NEEDS_PROFILE}"
    for key in _CUTS:
        if key in given:
            yield (
                f"{key} is given, and {_KEY} is {partition!r}, which says where to cut; remove one "
                "of the two"
            )
