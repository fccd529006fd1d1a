"""Errors in what is made of a frozen front, and which runs have it: each error names its key."""

from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.freezing.elastic.test_packing import packing
from tests.torchtitan.freezing.elastic.test_pipeline import elastic
from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.front.caching import EntryFolder
from timelyfreeze.policies.methods import freezes_by_turns, known_methods
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.freezing.checks import caches, check
from torchtitan.freezing.checks.features import CACHE
from torchtitan.freezing.checks.front import cache_folder_errors
from torchtitan.freezing.checks.matrix import feature_errors
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.ahead import RunningAhead
from torchtitan.freezing.elastic.run import ElasticRun
from torchtitan.freezing.launch import trainer_for
from torchtitan.freezing.trainer import FreezingTrainer


def cached(settings: CacheSettings | None = None, **changes: Any) -> JobConfig:
    job_config = config(
        **{"freezing__method": "fixed", "training__dataset": "alpaca", **changes},
    )
    job_config.freezing.cache = settings or CacheSettings(enable=True)
    return job_config


PLANNED = sorted(method for method in known_methods() if "timelyfreeze" in method)


ALONE = sorted(m for m in known_methods() if freezes_by_turns(m) and m not in PLANNED)


@pytest.mark.parametrize("method", ALONE)
def test_policies_alone_freeze_alike_in_every_microbatch(method: str) -> None:
    check(cached(freezing__method=method))


@pytest.mark.parametrize("method", PLANNED)
def test_a_plan_is_refused(method: str) -> None:
    [line] = errors(cached(freezing__method=method))
    assert line == (
        f"freezing.cache.enable is true, and freezing.method is {method!r}; what a front of "
        "llama3's blocks puts out for a row has to come again in the same process, so it must be a "
        "policy without a plan"
    )


def test_a_run_that_freezes_nothing_does_not_look_at_it() -> None:
    job_config = cached(CacheSettings(enable=True, memory_gib=-1.0), freezing__method="none")
    check(job_config)
    assert not caches(job_config)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"memory_gib": -1.0}, "freezing.cache.memory_gib is -1.0; it must be 0 or more"),
        ({"disk_gib": float("inf")}, "freezing.cache.disk_gib is inf; it must be 0 or more"),
        ({"memory_gib": 0.0}, "freezing.cache.memory_gib is 0.0, and freezing.cache.disk_gib too"),
        ({"disk_gib": 1.0, "folder": ""}, "freezing.cache.folder is empty"),
    ],
)
def test_rooms_that_make_no_sense(settings: dict[str, Any], rule: str) -> None:
    [line] = errors(cached(CacheSettings(enable=True, **settings)))
    assert line.startswith(rule)
    check(cached(CacheSettings(enable=False, **settings)))


@pytest.mark.parametrize("replicate", [1, 2])
def test_replicas_may_have_it(replicate: int) -> None:
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": replicate}
    changes = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    assert list(feature_errors(cached(**changes), (CACHE,))) == []


def test_a_folder_that_cannot_be_used_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_config = cached(CacheSettings(enable=True, disk_gib=1.0), job__dump_folder=str(tmp_path))
    assert list(cache_folder_errors(job_config)) == []
    held = EntryFolder(tmp_path / "activation_cache", 1, 1)
    assert list(cache_folder_errors(job_config)) == []
    monkeypatch.setenv("RANK", "1")
    [line] = cache_folder_errors(job_config)
    assert line == (
        "freezing.cache.folder is 'activation_cache', which another run uses; name another folder"
    )
    held.close()
    assert list(cache_folder_errors(job_config)) == []
    (tmp_path / "file").touch()
    job_config.freezing.cache = CacheSettings(enable=True, disk_gib=1.0, folder="file")
    [line] = cache_folder_errors(job_config)
    assert "is no folder" in line


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
def test_policies_without_a_plan_may_run_ahead(method: str, schedule: str) -> None:
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
    "method", ["fixed", "autofreeze", "pipetransformer", "egeria", "timelyfreeze+autofreeze"]
)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_may_be_elastic_with_a_plan_and_without(method: str, schedule: str) -> None:
    check(elastic(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule))


def test_an_elastic_run_by_time_needs_a_profile() -> None:
    by_time = ElasticSettings(enable=True, partition="time")
    assert errors(elastic(by_time)) == [
        "freezing.elastic.partition is 'time', which needs parallelism.partition_profile: a "
        "bounds.json that `timelyfreeze profile` or a training run has written"
    ]
    check(elastic(by_time, freezing__method="none"))
    check(elastic(ElasticSettings(partition="time")))


def test_an_elastic_run_goes_together_with_an_emulation() -> None:
    check(elastic(emulation__enable=True))


def test_an_elastic_run_goes_together_with_the_cache() -> None:
    job_config = elastic()
    job_config.freezing.cache = CacheSettings(enable=True)
    check(job_config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frozen_cost": -0.1}, "freezing.elastic.frozen_cost is -0.1; it must lie in [0, 1]"),
        ({"frozen_cost": 1.1}, "freezing.elastic.frozen_cost is 1.1; it must lie in [0, 1]"),
        (
            {"partition": "memory"},
            "freezing.elastic.partition is 'memory'; known: parameters, time",
        ),
        (
            {"global_batch": "linear"},
            "freezing.elastic.global_batch is 'linear'; known: constant, paper",
        ),
        ({"min_ranks": 1}, "freezing.elastic.min_ranks is 1; it must be 2 or more"),
        (
            {"join_limit_s": 0.0},
            "freezing.elastic.join_limit_s is 0.0; it must be above 0 and below "
            "comm.init_timeout_seconds (300), after which ranks fail that wait for another",
        ),
    ],
)
def test_settings_of_an_elastic_run_that_make_no_sense(
    settings: dict[str, Any], message: str
) -> None:
    assert errors(elastic(ElasticSettings(enable=True, **settings))) == [message]


def test_a_move_is_given_up_before_ranks_fail_that_wait() -> None:
    job_config = elastic(ElasticSettings(enable=True, join_limit_s=60.0))
    check(job_config)
    job_config.comm.init_timeout_seconds = 60
    (line,) = errors(job_config)
    assert line.startswith(
        "freezing.elastic.join_limit_s is 60.0; it must be above 0 and below "
        "comm.init_timeout_seconds (60)"
    )


@pytest.mark.parametrize("method", ["fixed", "autofreeze", "pipetransformer", "egeria"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_without_a_plan_may_grow_batches(method: str, schedule: str) -> None:
    check(packing(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule))


def test_the_largest_batch_is_not_below_that_of_the_start() -> None:
    assert errors(packing(PackingSettings("performance", max_global_batch=63))) == [
        "freezing.packing.max_global_batch is 63; it must be 0, or at least "
        "training.global_batch_size (64)"
    ]


def test_settings_of_packing_are_looked_at() -> None:
    [line] = errors(packing(PackingSettings("small")))
    assert line.startswith("freezing.packing.mode is 'small'; known: ")


def efficiency(**changes: Any) -> JobConfig:
    return packing(PackingSettings("efficiency"), **{"checkpoint__enable": True, **changes})


@pytest.mark.parametrize("method", ["fixed", "autofreeze", "pipetransformer", "egeria"])
def test_what_goes_on_with_fewer_ranks(method: str) -> None:
    check(efficiency(freezing__method=method))
