"""Finds errors in ``[freezing.elastic]``: what keeps a pipeline from becoming shorter."""

from __future__ import annotations

from collections.abc import Iterator

from timelyfreeze.policies import NONE, makes_plan
from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.checks.pipeline import one_stage_errors
from torchtitan.freezing.config import JobConfig

_ENABLED = "freezing.elastic.enable is true"
_ALONE = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


def elastic_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a run cannot go on in another pipeline; nothing where nothing is frozen."""
    freezing, parallelism = config.freezing, config.parallelism
    if not freezing.elastic.enable or freezing.method == NONE:
        return
    yield from freezing.elastic.errors()
    yield from join_errors(config)
    if makes_plan(freezing.method):
        yield (
            f"{_ENABLED}, and freezing.method is {freezing.method!r}, whose plan is of one "
            "pipeline; it must be a policy without a plan"
        )
    yield from one_stage_errors(config, _ENABLED)  # so a shorter pipeline has as many as ranks
    for degree in _ALONE:
        if (value := getattr(parallelism, degree)) > 1:
            yield f"{_ENABLED}, and parallelism.{degree} is {value}; it must be 1"
    dataset = config.training.dataset
    if not is_instruct_dataset(dataset):
        yield (
            f"{_ENABLED}, and training.dataset is {dataset!r}, whose rows cannot be dealt to more "
            f"replicas; it must be one of {', '.join(INSTRUCT_DATASETS)}"
        )
    if config.model.name != "llama3":
        yield (
            f"{_ENABLED}, and model.name is {config.model.name!r}, whose layers cannot be counted; "
            "it must be 'llama3'"
        )


def join_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a move could not be given up: messages from before it would be, first."""
    limit_s, timeout_s = config.freezing.elastic.join_limit_s, config.comm.init_timeout_seconds
    if not 0.0 < limit_s < timeout_s:
        yield (
            f"freezing.elastic.join_limit_s is {limit_s}; it must be above 0 and below "
            f"comm.init_timeout_seconds ({timeout_s}), after which ranks fail that wait for another"
        )
