"""What is noted in a bounds file about the pipeline, so that others can be planned from it."""

from __future__ import annotations

from collections.abc import Sequence

from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.whatif.notes import PipelineNotes
from torchtitan.freezing.config.job_config import JobConfig
from torchtitan.freezing.config.layout import examples_of_microbatch, stage_modules


def pipeline_notes(
    job_config: JobConfig,
    order: ScheduleOrder,
    n_layers: int | None,
    n_processors: float | None = None,
) -> PipelineNotes:
    """Return what a configuration tells about the pipeline whose times were measured.

    Args:
        job_config: The configuration of the run or profile.
        order: The order that ran.
        n_layers: Layers of the model; None for a model that does not count them.
        n_processors: How many ranks compute at once; None if each has a device of its own.
    """
    parallelism = job_config.parallelism
    layers = None
    if n_layers is not None:
        layers = count_layers(stage_modules(job_config, n_layers))
    return PipelineNotes(
        schedule=None
        if parallelism.pipeline_parallel_schedule_csv
        else parallelism.pipeline_parallel_schedule,
        ranks=order.n_ranks,
        processors=n_processors,
        first_stage=job_config.freezing.first_stage,
        skip_input_grads=job_config.freezing.skip_input_grads,
        layers=layers if layers is not None and len(layers) == order.n_stages else None,
        tokens_per_microbatch=examples_of_microbatch(job_config) * job_config.training.seq_len,
    )


def count_layers(stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the number of layers among the modules of each stage."""
    return tuple(sum(name.startswith("layers.") for name in modules) for modules in stages)
