"""Finds errors in ``freezing.run_ahead``: what keeps a frozen front from working ahead."""

from __future__ import annotations

from collections.abc import Iterator

from timelyfreeze.policies import NONE, makes_plan
from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.checks.parallel import lone_pipeline_errors
from torchtitan.freezing.checks.pipeline import one_stage_errors
from torchtitan.freezing.config import JobConfig

_ENABLED = "freezing.run_ahead is true"


def run_ahead_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a front cannot work ahead; nothing where nothing is frozen."""
    freezing = config.freezing
    if not freezing.run_ahead or freezing.method == NONE:
        return
    if makes_plan(freezing.method):
        yield (
            f"{_ENABLED}, and freezing.method is {freezing.method!r}, whose plan freezes other "
            "tensors in each microbatch; it must be a policy without a plan"
        )
    if config.emulation.enable:
        yield f"{_ENABLED}, and emulation.enable is true: one process has nobody to be ahead of"
    # A rank that holds a live stage too has no time to be ahead.
    yield from one_stage_errors(config, _ENABLED)
    alone = f"{_ENABLED}, and a front works ahead in one pipeline alone"
    yield from lone_pipeline_errors(config, alone)
    dataset = config.training.dataset
    if not is_instruct_dataset(dataset):
        yield (
            f"{_ENABLED}, and training.dataset is {dataset!r}, whose next batch cannot be looked "
            f"at; it must be one of {', '.join(INSTRUCT_DATASETS)}"
        )
    if config.model.name != "llama3":
        yield (
            f"{_ENABLED}, and model.name is {config.model.name!r}; only the blocks of llama3 are "
            "known to compute a row from nothing but its tokens and their weights"
        )
    for key in ("cache", "elastic"):
        if getattr(freezing, key).enable:
            yield (
                f"{_ENABLED}, and freezing.{key}.enable is true, which has its own use for the "
                "ranks of a frozen front; switch one of them off"
            )
    if freezing.packing.is_on:
        yield (
            f"{_ENABLED}, and freezing.packing.mode is {freezing.packing.mode!r}, by which the "
            "next batch may be larger; switch one of them off"
        )
