"""Pipelines and their cuts, and parallelism besides: what goes together, and what is told else."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchtitan.config import ConfigManager
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.checks import check
from torchtitan.freezing.values.pipeline import parallel_errors, partition_errors
from torchtitan.settings.job_config import job_config_class

EMULATED = {"emulation__enable": True}
CUTS = [
    "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
]


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


def test_the_key_is_found_in_toml_and_on_the_command_line(tmp_path: Any) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[emulation]\nenable = true\n")

    def parsed(*args: str) -> bool:
        return ConfigManager(job_config_class()).parse_args(list(args)).emulation.enable

    assert not parsed()
    assert parsed("--emulation.enable")
    assert parsed(f"--job.config_file={toml}")
    assert not parsed(f"--job.config_file={toml}", "--emulation.no_enable")


def found(monkeypatch: pytest.MonkeyPatch, n_processes: int | None, **keys: int) -> list[str]:
    if n_processes is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", str(n_processes))
    settings = {f"parallelism__{key}_degree": value for key, value in keys.items()}
    return list(parallel_errors(config(**settings)))


@pytest.mark.parametrize(
    ("n_processes", "keys"),
    [
        (4, {"pipeline_parallel": 4}),
        (8, {"pipeline_parallel": 4}),  # the rest shards
        (8, {"pipeline_parallel": 2, "data_parallel_replicate": 2}),
        (8, {"pipeline_parallel": 2, "data_parallel_shard": 2, "tensor_parallel": 2}),
        (None, {"pipeline_parallel": 4, "data_parallel_replicate": 2}),
        (2, {"pipeline_parallel": 1, "data_parallel_replicate": 2, "data_parallel_shard": 1}),
    ],
)
def test_what_goes_together_passes(monkeypatch, n_processes, keys) -> None:
    assert found(monkeypatch, n_processes, **keys) == []


def test_upstream_still_does_not_replicate_the_stages_of_a_pipeline() -> None:
    """Fails when upstream can; then the refusal has to go."""
    model = nn.Linear(2, 2)
    model.model_args = SimpleNamespace()
    dims = SimpleNamespace(
        seq_len_divisor=1,
        tp_enabled=False,
        cp_enabled=False,
        fsdp_enabled=False,
        dp_replicate_enabled=True,
        world_size=4,
        get_mesh=lambda name: SimpleNamespace(size=lambda: 2),
    )
    with pytest.raises(RuntimeError, match="DDP has not supported > 1D parallelism"):
        parallelize_llama(model, dims, config())


def test_time_has_a_profile() -> None:
    given = config(parallelism__partition="time", parallelism__partition_profile="bounds.json")
    assert list(partition_errors(given)) == []


@pytest.mark.parametrize("name", CUTS)
def test_another_way_to_cut_contradicts_it(name: str) -> None:
    job_config = config(parallelism__partition="parameters")
    (error,) = partition_errors(job_config, {f"parallelism.{name}", "training.steps"})
    assert error == (
        f"parallelism.{name} is given, and parallelism.partition is 'parameters', which says where "
        "to cut; remove one of the two"
    )
    assert list(partition_errors(config(), {f"parallelism.{name}"})) == []
