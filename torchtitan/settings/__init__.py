"""The configuration of a run, and the pipeline described by it."""

from torchtitan.settings.job_config import (
    Freezing,
    JobConfig,
    Loading,
    cache_folder,
    config_of_run,
    job_config_class,
    toml_key,
)
from torchtitan.settings.layout import (
    ATTENTION,
    IMAGE_MODELS,
    MLP,
    count_layers,
    count_sublayers,
    cuts_blocks,
    examples_of_microbatch,
    global_rows,
    has_pipeline,
    layers_of_split,
    model_family,
    modules_of_split,
    padding_note,
    pipeline_metadata,
    pipeline_order,
    pipeline_title,
    stage_modules,
)
from torchtitan.settings.presets import (
    adapters_half,
    preset_errors,
    preset_line,
    weights_half,
    with_preset,
    with_values,
)
