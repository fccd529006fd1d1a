"""Errors in a front that works ahead: each names its key, before anything starts."""

from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.freezing.checks import check
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic import ElasticRun, RunningAhead
from torchtitan.freezing.launch import trainer_for
from torchtitan.freezing.trainer import FreezingTrainer


def ahead(**changes: Any) -> JobConfig:
    values = {
        "freezing__method": "smartpipe",
        "freezing__run_ahead": True,
        "training__dataset": "alpaca",
        "model__flavor": "debugmodel",
        **changes,
    }
    return config(**values)


@pytest.mark.parametrize("method", ["fixed", "linear", "smartpipe", "autofreeze", "egeria"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_without_a_plan_are_taken(method: str, schedule: str) -> None:
    job_config = ahead(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule)
    check(job_config)
    assert issubclass(trainer_for(job_config), RunningAhead)


def test_without_freezing_nothing_is_wrong_and_nothing_is_ahead() -> None:
    job_config = ahead(freezing__method="none", training__dataset="c4")
    check(job_config)
    assert trainer_for(job_config) is FreezingTrainer


def test_nobody_is_ahead_unasked() -> None:
    job_config = ahead(freezing__run_ahead=False)
    assert trainer_for(job_config) is FreezingTrainer
    job_config.freezing.elastic = ElasticSettings(enable=True)
    assert trainer_for(job_config).func is ElasticRun


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freezing__method": "timelyfreeze+smartpipe"},
            ", and freezing.method is 'timelyfreeze+smartpipe', whose plan freezes other tensors "
            "in each microbatch; it must be a policy without a plan",
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"},
            ", and the schedule is 'ZBVZeroBubble'; parallelism.pipeline_parallel_schedule must be "
            "one with a stage on each rank: GPipe, 1F1B",
        ),
        (
            {"training__dataset": "c4"},
            ", and training.dataset is 'c4', whose next batch cannot be looked at; it must be one "
            "of auto, messages, sharegpt, prompt_completion, alpaca",
        ),
        (
            {"emulation__enable": True},
            ", and emulation.enable is true: one process has nobody to be ahead of",
        ),
        (
            {"model__name": "deepseek_v3"},
            ", and model.name is 'deepseek_v3'; only the blocks of llama3 are known to compute a "
            "row from nothing but its tokens and their weights",
        ),
        (
            {"freezing__cache": CacheSettings(enable=True)},
            ", and freezing.cache.enable is true, which has its own use for the ranks of a frozen "
            "front; switch one of them off",
        ),
        (
            {"freezing__elastic": ElasticSettings(enable=True)},
            ", and freezing.elastic.enable is true, which has its own use for the ranks of a "
            "frozen front; switch one of them off",
        ),
        (
            {"freezing__packing": PackingSettings("performance")},
            ", and freezing.packing.mode is 'performance', by which the next batch may be larger; "
            "switch one of them off",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    assert f"freezing.run_ahead is true{message}" in errors(ahead(**changes))


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("data_parallel_shard_degree", "1 or -1"),
        ("data_parallel_replicate_degree", "1"),
        ("tensor_parallel_degree", "1"),
        ("context_parallel_degree", "1"),
    ],
)
def test_replicas_and_parts_of_layers_are_refused(key: str, allowed: str) -> None:
    lines = errors(ahead(**{f"parallelism__{key}": 2}))
    assert (
        f"parallelism.{key} is 2; freezing.run_ahead is true, and a front works ahead in one "
        f"pipeline alone, so it must be {allowed}"
    ) in lines


def test_processes_that_are_left_would_be_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    check(ahead())
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert errors(ahead()) == [
        "parallelism.data_parallel_shard_degree is -1, and the processes started make 2 of it; "
        "freezing.run_ahead is true, and a front works ahead in one pipeline alone, so start as "
        "many as parallelism.pipeline_parallel_degree (4)"
    ]
