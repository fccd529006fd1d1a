"""What contradicts a pipeline in one process is told with key, value and rule."""

from typing import Any

import pytest
from torchtitan.config import ConfigManager

from tests.torchtitan.helpers.job_configs import config, errors
from torchtitan.freezing.checks import check
from torchtitan.freezing.config.job_config import job_config_class

EMULATED = {"emulation__enable": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freezing__method": "none"},
        {"parallelism__data_parallel_shard_degree": 1},
        {"parallelism__data_parallel_shard_degree": -1},
        {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"},
        {"parallelism__pipeline_parallel_schedule": "DualPipeV", "freezing__method": "none"},
    ],
    ids=str,
)
def test_a_pipeline_alone_can_be_emulated(changes: dict[str, Any]) -> None:
    check(config(**EMULATED, **changes))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"parallelism__pipeline_parallel_degree": 1, "freezing__method": "none"},
            ["emulation.enable is true", "pipeline_parallel_degree is 1", "2 or more"],
        ),
        *(
            (
                {f"parallelism__{name}": 2},
                ["emulation.enable is true", f"parallelism.{name} is 2", "must be 1"],
            )
            for name in (
                "data_parallel_replicate_degree",
                "data_parallel_shard_degree",
                "context_parallel_degree",
                "tensor_parallel_degree",
                "expert_parallel_degree",
                "expert_tensor_parallel_degree",
            )
        ),
        (
            {"comm__mode": "fake_backend"},
            ["emulation.enable is true", "comm.mode is 'fake_backend'", 'must be "default"'],
        ),
    ],
    ids=str,
)
def test_a_contradiction_is_told(changes: dict[str, Any], parts: list[str]) -> None:
    (line,) = errors(config(**EMULATED, **changes))
    for part in parts:
        assert part in line


def test_one_process_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (line,) = errors(config(**EMULATED))
    assert "4 processes were started" in line
    assert "NGPU=1" in line
    monkeypatch.setenv("WORLD_SIZE", "1")
    check(config(**EMULATED))
    monkeypatch.setenv("WORLD_SIZE", "4")
    check(config())


def test_overlapping_actions_cannot_be_emulated() -> None:
    changes = {
        "parallelism__pipeline_parallel_schedule": "DualPipeV",
        "parallelism__pipeline_parallel_expert_parallel_overlap": True,
    }
    (line,) = errors(config(**EMULATED, **changes, freezing__method="none"))
    assert "parallelism.pipeline_parallel_expert_parallel_overlap is true" in line


def test_the_key_is_found_in_toml_and_on_the_command_line(tmp_path: Any) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[emulation]\nenable = true\n")

    def parsed(*args: str) -> bool:
        return ConfigManager(job_config_class()).parse_args(list(args)).emulation.enable

    assert not parsed()
    assert parsed("--emulation.enable")
    assert parsed(f"--job.config_file={toml}")
    assert not parsed(f"--job.config_file={toml}", "--emulation.no_enable")
