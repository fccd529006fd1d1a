"""Errors in the choice of a freezing method and in its policy's settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

import timelyfreeze.policies.policy as policy_module
from tests.torchtitan.helpers.job_configs import config, errors
from timelyfreeze.policies.methods import known_methods
from timelyfreeze.policies.policy import registered_policies
from timelyfreeze.settings.phases import PhaseSchedule
from torchtitan.freezing.checks import check, freeze_settings
from torchtitan.freezing.config.job_config import job_config_class


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
    equal = {"last_warmup_step": 60, "last_monitor_step": 60, "last_ramp_step": 60}
    equal = {f"freezing__{key}": value for key, value in equal.items()}
    [line] = errors(config(freezing__method=method, **equal))
    assert line == (
        "freezing.last_monitor_step is 60, as last_warmup_step; "
        f"freezing.method {method!r} needs steps in between to measure in"
    )


@pytest.mark.parametrize("method", ["egeria", "timelyfreeze+egeria"])
def test_blocks_whose_masks_come_from_the_data_are_not_compared(method: str) -> None:
    check(config(freezing__method=method))
    found = errors(config(freezing__method=method, model__flavor="debugmodel_flex_attn"))
    rule = "model.flavor 'debugmodel_flex_attn' has attn_type 'flex', whose masks cannot be"
    assert any(line.startswith(rule) for line in found), found


@pytest.mark.parametrize("method", ["apf", "timelyfreeze+apf"])
def test_errors_of_a_policy_are_told_with_all_others(method: str) -> None:
    job_config = config(freezing__method=method, freezing__seed=-1, freezing__score_memory="disk")
    apf = registered_policies()["apf"]
    job_config.freezing.apf = apf(threshold=2.0, check_interval=0)
    assert sorted(errors(job_config)) == [
        "freezing.apf.check_interval is 0; it must be 1 or more",
        "freezing.apf.threshold is 2.0; it must lie in [0, 1]",
        "freezing.score_memory is 'disk'; known: device, host",
        "freezing.seed is -1; it must be 0 or more and below 2**64",
    ]


def test_settings_of_a_policy_that_is_not_used_do_not_matter() -> None:
    job_config = config(freezing__method="fixed")
    job_config.freezing.apf = registered_policies()["apf"](threshold=2.0)
    check(job_config)


@pytest.mark.parametrize("last", [-1, 1000])
def test_warm_up_must_end_within_the_run(last: int) -> None:
    [line] = errors(config(freezing__method="fixed", freezing__last_warmup_step=last))
    assert line == (
        f"freezing.last_warmup_step is {last}; it must be 0 or more and lie before training.steps "
        "(1000), or nothing is ever frozen"
    )


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
    job_config.freezing.toy = freezing.toy
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
