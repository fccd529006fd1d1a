"""Errors in the choice of a freezing method and in its policy's settings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

import timelyfreeze.policies.policy as policy_module
from tests.torchtitan.freezing.elastic.test_packing import packing
from tests.torchtitan.freezing.elastic.test_pipeline import elastic
from tests.torchtitan.helpers.job_configs import config, errors, front_config, put
from timelyfreeze.front.caching import EntryFolder
from timelyfreeze.policies.methods import freezes_by_turns, known_methods
from timelyfreeze.policies.policy import registered_policies
from timelyfreeze.settings import CacheSettings, ElasticSettings, PackingSettings
from timelyfreeze.settings.phases import PhaseSchedule
from torchtitan.freezing.checks import check, with_rank
from torchtitan.freezing.checks.checkpoints import output_errors
from torchtitan.freezing.checks.features import CACHE
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.freezing.elastic.ahead import RunningAhead
from torchtitan.freezing.elastic.run import ElasticRun
from torchtitan.freezing.launch import trainer_for
from torchtitan.freezing.trainer import FreezingTrainer
from torchtitan.freezing.values.freezing import caches, freeze_settings
from torchtitan.settings import JobConfig
from torchtitan.settings.job_config import job_config_class


@pytest.mark.parametrize("method", [m for m in known_methods() if "timelyfreeze" not in m])
def test_a_method_without_a_plan_needs_no_phases_but_warm_up(method: str) -> None:
    if method == "lora" and find_spec("peft") is None:
        pytest.skip("peft is not installed: the extra lora has it")
    check(
        config(
            freezing__method=method,
            freezing__last_warmup_step=10,
            freezing__last_monitor_step=5,
            freezing__last_ramp_step=1,
            freezing__max_freeze_ratio=7.0,
        )
    )


@pytest.mark.parametrize("method", [m for m in known_methods() if m.startswith("timelyfreeze")])
def test_a_method_with_a_plan_needs_its_phases(method: str) -> None:
    check(config(freezing__method=method))
    [line] = errors(config(freezing__method=method, freezing__last_monitor_step=60))
    assert line.startswith("freezing.last_monitor_step is 60; it must be at least 2 above")


@pytest.mark.parametrize("method", ["egeria", "timelyfreeze+egeria"])
def test_blocks_whose_masks_come_from_the_data_are_not_compared(method: str) -> None:
    check(config(freezing__method=method))
    found = errors(config(freezing__method=method, model__flavor="debugmodel_flex_attn"))
    rule = f"freezing.method is {method!r}, and model.flavor is 'debugmodel_flex_attn'; each rank "
    assert any(line.startswith(rule) for line in found), found


def test_settings_of_a_policy_that_is_not_used_do_not_matter() -> None:
    job_config = config(freezing__method="fixed")
    put(job_config, "freezing", apf=registered_policies()["apf"](threshold=2.0))
    check(job_config)


def test_settings_of_a_policy_come_from_its_section_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[freezing.apf]\nthreshold = 0.25\nalpha = 0.5\n")
    arguments = [f"--job.config_file={path}", "--freezing.apf.alpha=0.75"]
    freezing = ConfigManager(job_config_class()).parse_args(arguments).freezing
    assert freezing.apf == registered_policies()["apf"](threshold=0.25, alpha=0.75)
    assert freezing.fixed == registered_policies()["fixed"]()


def test_a_registered_policy_has_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registered_policies()
    monkeypatch.setattr(policy_module, "_POLICIES", dict(known))

    @policy_module.register_policy("toy")
    @dataclass(frozen=True)
    class Toy:
        pace: int = 3

        def errors(self) -> Iterator[str]:
            if self.pace < 1:
                yield f"freezing.toy.pace is {self.pace}; it must be 1 or more"

    arguments = ["--freezing.method=toy", "--freezing.toy.pace=0"]
    freezing = ConfigManager(job_config_class()).parse_args(arguments).freezing
    job_config = config(freezing__method="toy")
    put(job_config, "freezing", toy=freezing.toy)
    assert errors(job_config) == ["freezing.toy.pace is 0; it must be 1 or more"]


def test_phases_of_a_method_without_a_plan() -> None:
    settings = freeze_settings(config(freezing__method="apf").freezing)
    assert settings.phases == PhaseSchedule.unplanned(60)


@pytest.mark.parametrize(
    ("method", "rank"), [("apf", 0), ("timelyfreeze", 8), ("timelyfreeze+apf", 8)]
)
def test_subspaces_belong_to_a_plan(method: str, rank: int) -> None:
    job_config = config(freezing__method=method, freezing__gradient_rank=8)
    check(job_config)
    assert freeze_settings(job_config.freezing).gradient_rank == rank


@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        ([16, 32, 64], {"model__flavor": "SmolLM2-135M"}),
        (32, {"model__flavor": "SmolLM2-135M", "freezing__last_warmup_step": 2}),
        (
            [16, 32, 64],
            {"model__flavor": "Llama-3-8B", "freezing__method": "timelyfreeze+apf"},
        ),
        (0, {"model__flavor": "8M"}),  # 256 wide
        (0, {"model__flavor": "SmolLM2-135M", "freezing__method": "apf"}),
        (0, {"model__flavor": "Llama-3-8B", "parallelism__tensor_parallel_degree": 2}),
        ([16, 32, 64], {"model__flavor": "Llama-3-8B", "compile__enable": True}),
        (0, {"model__name": "vit", "model__flavor": "4M"}),
        (0, {"model__flavor": "none of ours"}),
    ],
)
def test_ranks_are_given_by_width_where_they_work(rank: Any, changes: dict[str, Any]) -> None:
    auto = config(freezing__gradient_rank="auto", **changes)
    assert with_rank(auto).freezing.gradient_rank == rank
    assert auto.freezing.gradient_rank == "auto"
    given = config(freezing__gradient_rank=5, **changes)
    assert with_rank(given) is given


def cached(settings: CacheSettings | None = None, **changes: Any) -> JobConfig:
    return front_config(freezing__cache=settings or CacheSettings(enable=True), **changes)


PLANNED = sorted(method for method in known_methods() if "timelyfreeze" in method)


ALONE = sorted(m for m in known_methods() if freezes_by_turns(m) and m not in PLANNED)


@pytest.mark.parametrize("method", ALONE)
def test_policies_alone_freeze_alike_in_every_microbatch(method: str) -> None:
    check(cached(freezing__method=method))


def test_a_run_that_freezes_nothing_does_not_look_at_it() -> None:
    job_config = cached(CacheSettings(enable=True, memory_gib=-1.0), freezing__method="none")
    check(job_config)
    assert not caches(job_config)
    check(cached(CacheSettings(memory_gib=0.0)))


@pytest.mark.parametrize("replicate", [1, 2])
def test_replicas_may_have_it(replicate: int) -> None:
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": replicate}
    changes = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    assert list(feature_errors(cached(**changes), (CACHE,))) == []


def test_a_folder_that_cannot_be_used_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_config = cached(CacheSettings(enable=True, disk_gib=1.0), job__dump_folder=str(tmp_path))
    assert list(output_errors(job_config)) == []
    held = EntryFolder(tmp_path / "activation_cache", 1, 1)
    assert list(output_errors(job_config)) == []
    monkeypatch.setenv("RANK", "1")
    [line] = output_errors(job_config)
    assert line == (
        "freezing.cache.folder is 'activation_cache', and another run uses "
        f"{str(tmp_path / 'activation_cache')!r}; name another folder"
    )
    held.close()
    assert list(output_errors(job_config)) == []
    (tmp_path / "file").touch()
    put(job_config, "freezing", cache=CacheSettings(enable=True, disk_gib=1.0, folder="file"))
    [line] = output_errors(job_config)
    assert "is no folder" in line


def ahead(**changes: Any) -> JobConfig:
    return front_config(**{"freezing__method": "smartpipe", "freezing__run_ahead": True, **changes})


@pytest.mark.parametrize("method", ["fixed", "linear", "smartpipe", "autofreeze", "egeria"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_policies_without_a_plan_may_run_ahead(method: str, schedule: str) -> None:
    job_config = ahead(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule)
    check(job_config)
    (part,) = trainer_for(job_config).keywords["run"].parts
    assert isinstance(part, RunningAhead)


def test_without_freezing_nothing_is_wrong_and_nothing_is_ahead() -> None:
    job_config = ahead(freezing__method="none", training__dataset="c4")
    check(job_config)
    assert trainer_for(job_config) is FreezingTrainer


def test_nobody_is_ahead_unasked() -> None:
    job_config = ahead(freezing__run_ahead=False)
    assert trainer_for(job_config) is FreezingTrainer
    put(job_config, "freezing", elastic=ElasticSettings(enable=True))
    assert trainer_for(job_config).func is ElasticRun


def efficiency(**changes: Any) -> JobConfig:
    return packing(PackingSettings("efficiency"), **{"checkpoint__enable": True, **changes})


@pytest.mark.parametrize("method", ["fixed", "autofreeze", "pipetransformer", "egeria"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("made", [elastic, packing, efficiency])
def test_policies_without_a_plan_may_move_and_grow_batches(
    made: Callable[..., JobConfig], method: str, schedule: str
) -> None:
    check(made(freezing__method=method, parallelism__pipeline_parallel_schedule=schedule))


def test_a_run_that_is_not_elastic_by_time_needs_no_profile() -> None:
    by_time = ElasticSettings(enable=True, partition="time")
    check(elastic(by_time, freezing__method="none"))
    check(elastic(ElasticSettings(partition="time")))


@pytest.mark.parametrize(
    "other",
    [
        {"emulation__enable": True},
        {"freezing__cache": CacheSettings(enable=True)},
        {"freezing__method": "timelyfreeze+autofreeze"},
    ],
)
def test_an_elastic_run_goes_together_with(other: dict[str, Any]) -> None:
    check(elastic(**other))


@pytest.mark.parametrize("method", ["fixed", "timelyfreeze+fixed"])
def test_names_that_the_model_has_are_taken(method: str) -> None:
    job_config = config(freezing__method=method)
    fixed = registered_policies()["fixed"]
    put(job_config, "freezing", fixed=fixed(names=["embed", "layers.0-1", "*.norm", "*_norm"]))
    check(job_config)
