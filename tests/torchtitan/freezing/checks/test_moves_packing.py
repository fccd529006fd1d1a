"""Errors in packing: each names its key, before anything starts."""

from typing import Any

import pytest

from tests.torchtitan.freezing.elastic.test_packing import packing
from tests.torchtitan.helpers.job_configs import errors
from timelyfreeze.cli.torchrun import NEXT
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from torchtitan.freezing.checks import check
from torchtitan.freezing.config import JobConfig


@pytest.mark.parametrize("method", ["fixed", "autofreeze", "pipetransformer", "egeria"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_without_a_plan_are_taken(method: str, schedule: str) -> None:
    check(packing(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule))


def test_without_freezing_nothing_is_wrong() -> None:
    check(packing(freezing__method="none", training__dataset="c4"))


ON = "freezing.packing.mode is 'performance', and "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freezing__method": "timelyfreeze+apf"},
            f"{ON}freezing.method is 'timelyfreeze+apf', whose plan is of one size of "
            "microbatches; it must be a policy without a plan",
        ),
        (
            {"freezing__skip_input_grads": "off"},
            f"{ON}a frozen front keeps its activations with freezing.first_stage 'all_or_nothing' "
            'and skip_input_grads \'off\'; they must be "all_or_nothing" and "use"',
        ),
        (
            {"freezing__first_stage": "per_tensor"},
            f"{ON}a frozen front keeps its activations with freezing.first_stage 'per_tensor' "
            'and skip_input_grads \'use\'; they must be "all_or_nothing" and "use"',
        ),
        (
            {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"},
            f"{ON}the schedule is 'Interleaved1F1B'; parallelism.pipeline_parallel_schedule must "
            "be one with a stage on each rank: GPipe, 1F1B",
        ),
        (
            {"parallelism__data_parallel_shard_degree": 2},
            f"parallelism.data_parallel_shard_degree is 2; {ON}memory is estimated for pipeline "
            "parallelism alone, so it must be 1 or -1",
        ),
        (
            {"model__name": "qwen3", "model__flavor": "0.6B"},
            f"{ON}model.name is 'qwen3'; memory is estimated for 'llama3'",
        ),
        (
            {"activation_checkpoint__mode": "selective"},
            f"{ON}activation_checkpoint.mode is 'selective'; memory is estimated for "
            '"none" and "full"',
        ),
        (
            {"compile__enable": True},
            f'{ON}compile.components has "model": compiled blocks keep their activations, frozen '
            'or not; set compile.enable = false or components = ["loss"]',
        ),
        (
            {"emulation__enable": True},
            f"{ON}emulation.enable is true: one device holds all ranks",
        ),
        (
            {"training__dataset": "c4"},
            f"{ON}training.dataset is 'c4'; batches grow of auto, messages, sharegpt, "
            "prompt_completion, alpaca",
        ),
        (
            {"training__global_batch_size": 60},
            "training.global_batch_size is 60; it must be a multiple of training.local_batch_size "
            "(8)",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    assert message in errors(packing(**changes))


def test_replicas_of_the_rest_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    job_config = packing(parallelism__data_parallel_shard_degree=-1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check(job_config)
    monkeypatch.setenv("WORLD_SIZE", "8")
    [line] = errors(job_config)
    assert line.startswith(
        "parallelism.data_parallel_shard_degree is -1, and the processes started make 2 of it; "
    )


@pytest.mark.parametrize("section", ["elastic", "cache"])
def test_one_change_at_a_time(section: str) -> None:
    job_config = packing()
    settings = ElasticSettings(enable=True) if section == "elastic" else CacheSettings(enable=True)
    setattr(job_config.freezing, section, settings)
    assert f"{ON}freezing.{section}.enable is true; switch one of them off" in errors(job_config)


def test_the_largest_batch_is_not_below_that_of_the_start() -> None:
    assert errors(packing(PackingSettings("performance", max_global_batch=63))) == [
        "freezing.packing.max_global_batch is 63; it must be 0, or at least "
        "training.global_batch_size (64)"
    ]


def test_settings_are_looked_at() -> None:
    [line] = errors(packing(PackingSettings("small")))
    assert line.startswith("freezing.packing.mode is 'small'; known: ")


def efficiency(**changes: Any) -> JobConfig:
    return packing(PackingSettings("efficiency"), **{"checkpoint__enable": True, **changes})


@pytest.mark.parametrize("method", ["fixed", "autofreeze", "pipetransformer", "egeria"])
def test_what_goes_on_with_fewer_ranks(method: str) -> None:
    check(efficiency(freezing__method=method))


@pytest.mark.parametrize(
    ("key", "value", "told", "needed"),
    [
        ("enable", False, "false", "true"),
        ("load_only", True, "true", "false"),
        ("load_step", 4, "4", "-1"),
        ("exclude_from_loading", ["freezing"], '["freezing"]', "[]"),
    ],
)
def test_fewer_processes_need_all_of_the_last_checkpoint(
    key: str, value: Any, told: str, needed: str
) -> None:
    assert errors(efficiency(**{f"checkpoint__{key}": value})) == [
        f"freezing.packing.mode is 'efficiency', and checkpoint.{key} is {told}; fewer processes "
        f"go on from all of the last checkpoint, so it must be {needed}"
    ]


def test_fewer_processes_need_somebody_who_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NEXT, raising=False)
    job_config = efficiency()
    check(job_config)  # nothing has been started
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert errors(job_config) == [
        "freezing.packing.mode is 'efficiency', and the run was started by torchrun alone, which "
        "would not start it again with fewer processes; start it by `timelyfreeze train` or "
        "run_train.sh"
    ]
    monkeypatch.setenv(NEXT, "next_part.json")
    check(job_config)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert errors(job_config) == [
        "freezing.packing.mode is 'efficiency', and the run has 2 nodes, which cannot be given "
        "back; start it on one"
    ]
