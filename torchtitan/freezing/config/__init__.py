"""The configuration of a run, and the pipeline that it describes."""

from torchtitan.freezing.config.job_config import (
    Freezing,
    JobConfig,
    Model,
    job_config_class,
    toml_key,
)
from torchtitan.freezing.config.layout import (
    count_layers,
    examples_of_microbatch,
    pipeline_notes,
    pipeline_order,
    pipeline_title,
    stage_modules,
)

__all__ = [
    "Freezing", "JobConfig", "Model", "count_layers", "examples_of_microbatch",
    "job_config_class", "pipeline_notes", "pipeline_order", "pipeline_title", "stage_modules",
    "toml_key",
]  # fmt: skip
