"""Configurations for tests, from ``section__key`` and value."""

from dataclasses import replace
from typing import Any

import pytest

from torchtitan.freezing.checks import ConfigError, check
from torchtitan.settings.job_config import JobConfig, job_config_class


def make_job_config(**values: Any) -> JobConfig:
    """The defaults, then ``section__key=value``; a key that does not exist is an error here.

    A file that is read gets a number for the rank "auto", of narrow models 0.
    """
    job_config = job_config_class()()
    for key, value in {"freezing__gradient_rank": 0, **values}.items():
        section, name = key.split("__")
        put(job_config, section, **{name: value})
    return job_config


def put(job_config: JobConfig, section: str, **values: Any) -> None:
    """Give keys of a section, which may be frozen, other values."""
    setattr(job_config, section, replace(getattr(job_config, section), **values))


def config(**changes: Any) -> JobConfig:
    """A configuration without errors, then ``section__key=value``."""
    values = {
        "training__steps": 1000,
        "training__local_batch_size": 8,
        "parallelism__pipeline_parallel_degree": 4,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "parallelism__pipeline_parallel_expert_parallel_overlap": False,
        "activation_checkpoint__mode": "none",
        "freezing__method": "timelyfreeze",
        **changes,
    }
    return make_job_config(**values)


def front_config(**changes: Any) -> JobConfig:
    """A run whose front freezes, on instruction data, then ``section__key=value``."""
    values = {"freezing__method": "fixed", "training__dataset": "alpaca", **changes}
    return config(**{"model__flavor": "debugmodel", **values})


def errors(job_config: JobConfig) -> list[str]:
    """The lines of the error, each without its dash."""
    with pytest.raises(ConfigError) as error:
        check(job_config)
    first, *lines = str(error.value).splitlines()
    count = "an error" if len(lines) == 1 else f"{len(lines)} errors"
    assert first == f"The configuration has {count}:"
    assert all(line.startswith("  - ") for line in lines)
    assert len(set(lines)) == len(lines), "told twice"
    return [line.removeprefix("  - ") for line in lines]
