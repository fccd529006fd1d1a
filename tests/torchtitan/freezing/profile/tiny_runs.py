"""A configuration of upstream's debug model, small enough to be profiled in a test."""

from typing import Any

from torchtitan.freezing.config.job_config import JobConfig, job_config_class

N_LAYERS = 6  # of upstream's debug model


def config(**changes: Any) -> JobConfig:
    job_config = job_config_class()()
    values = {
        "model__name": "llama3",
        "model__flavor": "debugmodel",
        "training__local_batch_size": 8,
        "training__seq_len": 16,
        "training__mixed_precision_param": "float32",
        "parallelism__pipeline_parallel_degree": 3,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        "parallelism__pipeline_parallel_microbatch_size": 2,
        "activation_checkpoint__mode": "none",
        **changes,
    }
    for key, value in values.items():
        section, name = key.split("__")
        assert hasattr(getattr(job_config, section), name), key
        setattr(getattr(job_config, section), name, value)
    return job_config
