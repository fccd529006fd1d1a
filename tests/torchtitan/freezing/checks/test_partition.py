"""Partitions that are refused, by key and value."""

import pytest

from tests.torchtitan.helpers.job_configs import config, errors
from torchtitan.freezing.checks import partition_errors

CUTS = [
    "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
]


def test_an_unknown_partition_is_refused() -> None:
    (error,) = errors(config(parallelism__partition="tme"))
    assert error == "parallelism.partition is 'tme'; known: time, parameters, memory"


def test_time_needs_a_profile() -> None:
    (error,) = errors(config(parallelism__partition="time"))
    assert error.startswith(
        "parallelism.partition is 'time', which needs parallelism.partition_profile"
    )
    given = config(parallelism__partition="time", parallelism__partition_profile="bounds.json")
    assert list(partition_errors(given)) == []


def test_a_partition_needs_a_pipeline() -> None:
    job_config = config(parallelism__partition="memory", parallelism__pipeline_parallel_degree=1)
    (error,) = partition_errors(job_config)
    assert error == (
        "parallelism.partition is 'memory', which needs parallelism.pipeline_parallel_degree of 2 "
        "or more; it is 1"
    )


@pytest.mark.parametrize("name", CUTS)
def test_another_way_to_cut_contradicts_it(name: str) -> None:
    job_config = config(parallelism__partition="parameters")
    (error,) = partition_errors(job_config, {f"parallelism.{name}", "training.steps"})
    assert error == (
        f"parallelism.{name} is given, and parallelism.partition is 'parameters', which says where "
        "to cut; remove one of the two"
    )
    assert list(partition_errors(config(), {f"parallelism.{name}"})) == []
