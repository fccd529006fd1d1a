"""Upstream's debug model over three ranks: as a configuration, and as the TOML file of a run."""

import json
from typing import Any

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.settings.job_config import JobConfig

N_LAYERS = 6
_VALUES = {
    "model__name": "llama3",
    "model__flavor": "debugmodel",
    "training__local_batch_size": 8,
    "training__seq_len": 16,
    "training__mixed_precision_param": "float32",
    "parallelism__pipeline_parallel_degree": 3,
    "parallelism__pipeline_parallel_schedule": "1F1B",
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "activation_checkpoint__mode": "none",
}


def config(**changes: Any) -> JobConfig:
    """The configuration with ``section__key=value`` changed."""
    return make_job_config(**{**_VALUES, **changes})


def toml_text(**changes: Any) -> str:
    """The file with ``section__key=value`` changed; texts, numbers and lists are those of JSON."""
    values = {**_VALUES, **changes}
    lines = [f"{key.replace('__', '.')} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
