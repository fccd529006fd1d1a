"""Degrees of parallelism that do not go together are named before anything starts."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.checks import pipeline as float8_checks
from torchtitan.freezing.checks.pipeline import GROUPED, LINEAR, float8_errors, parallel_errors


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


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_context_parallelism_is_refused_on_a_cpu(monkeypatch, has_accelerator: bool) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    messages = found(monkeypatch, 4, pipeline_parallel=2, context_parallel=2)
    assert len(messages) == (not has_accelerator)
    for message in messages:
        assert "parallelism.context_parallel_degree is 2" in message
        assert "must be 1 on a CPU" in message


@pytest.mark.parametrize("components", [["model", "loss"], ["loss"]])
def test_compiled_blocks_whose_tensors_are_split_are_refused(components: list[str]) -> None:
    messages = list(
        parallel_errors(
            config(
                compile__enable=True,
                compile__components=components,
                parallelism__tensor_parallel_degree=2,
            )
        )
    )
    assert len(messages) == ("model" in components)
    for message in messages:
        assert "parallelism.tensor_parallel_degree is 2" in message
        assert 'compile.components has "model"' in message


@pytest.mark.parametrize(
    ("n_processes", "keys", "words"),
    [
        (4, {"pipeline_parallel": 3}, ["4 processes", "pipeline_parallel_degree (3) = 3"]),
        (2, {"pipeline_parallel": 4}, ["2 processes", "= 4", "NGPU"]),
        (
            4,
            {"pipeline_parallel": 2, "data_parallel_shard": 4},
            ["4 processes", "data_parallel_shard_degree (4) = 8"],
        ),
        (
            4,
            {"pipeline_parallel": 2, "data_parallel_replicate": 2},
            ["data_parallel_replicate_degree is 2", "data_parallel_shard_degree is 1"],
        ),
        (
            None,
            {"pipeline_parallel": 2, "data_parallel_replicate": 2, "data_parallel_shard": 1},
            ["data_parallel_replicate_degree is 2"],
        ),
    ],
)
def test_each_error_is_named(monkeypatch, n_processes, keys, words) -> None:
    (message,) = found(monkeypatch, n_processes, **keys)
    for word in words:
        assert word in message


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


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """What the machine has, to be changed by a test."""
    has = {"torchao": True, "gpu": False}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        float8_checks.importlib.util,
        "find_spec",
        lambda name: (object() if has["torchao"] else None) if name == "torchao" else find(name),
    )
    monkeypatch.setattr(float8_checks, "has_cuda_capability", lambda major, minor: has["gpu"])
    return has


def found_float8(*converters: str, **changes: Any) -> list[str]:
    job_config = config(model__converters=list(converters), **changes)
    job_config.quantize.linear.float8.emulate = changes.get("compile__enable") is not None
    return list(float8_errors(job_config))


def test_without_converters_nothing_is_asked_for(machine: dict[str, bool]) -> None:
    machine["torchao"] = False
    assert found_float8() == []


def test_a_missing_package_is_named(machine: dict[str, bool]) -> None:
    machine.update(torchao=False, gpu=True)
    (error,) = found_float8(LINEAR)
    assert "'quantize.linear.float8', which needs the package torchao" in error


@pytest.mark.parametrize("gpu", [True, False])
def test_a_machine_that_lacks_float8_has_to_emulate(machine: dict[str, bool], gpu: bool) -> None:
    machine["gpu"] = gpu
    errors = found_float8(LINEAR)
    assert len(errors) == (not gpu)
    assert all("set quantize.linear.float8.emulate = true" in error for error in errors)


@pytest.mark.parametrize(("gpu", "compiles"), [(False, True), (False, False), (True, True)])
def test_emulation_is_eager(machine: dict[str, bool], gpu: bool, compiles: bool) -> None:
    machine["gpu"] = gpu
    errors = found_float8(LINEAR, compile__enable=compiles)
    assert len(errors) == (compiles and not gpu)
    for error in errors:
        assert "quantize.linear.float8.emulate is true" in error
        assert "compile.enable = false" in error


def test_experts_in_float8_have_no_pipeline() -> None:
    (error,) = found_float8(GROUPED, parallelism__pipeline_parallel_degree=2)
    assert "parallelism.pipeline_parallel_degree is 2" in error
    assert found_float8(GROUPED, parallelism__pipeline_parallel_degree=1) == []
