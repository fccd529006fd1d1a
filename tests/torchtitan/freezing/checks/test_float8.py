"""What keeps float8 from working is told before anything starts."""

import importlib.util
from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import config
from torchtitan.freezing.checks import float8 as float8_checks
from torchtitan.freezing.checks.float8 import GROUPED, LINEAR, float8_errors


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


def found(*converters: str, **changes: Any) -> list[str]:
    job_config = config(model__converters=list(converters), **changes)
    job_config.quantize.linear.float8.emulate = changes.get("compile__enable") is not None
    return list(float8_errors(job_config))


def test_without_converters_nothing_is_asked_for(machine: dict[str, bool]) -> None:
    machine["torchao"] = False
    assert found() == []


def test_a_missing_package_is_named(machine: dict[str, bool]) -> None:
    machine.update(torchao=False, gpu=True)
    (error,) = found(LINEAR)
    assert "'quantize.linear.float8', which needs the package torchao" in error


@pytest.mark.parametrize("gpu", [True, False])
def test_a_machine_that_lacks_float8_has_to_emulate(machine: dict[str, bool], gpu: bool) -> None:
    machine["gpu"] = gpu
    errors = found(LINEAR)
    assert len(errors) == (not gpu)
    assert all("set quantize.linear.float8.emulate = true" in error for error in errors)


@pytest.mark.parametrize(("gpu", "compiles"), [(False, True), (False, False), (True, True)])
def test_emulation_is_eager(machine: dict[str, bool], gpu: bool, compiles: bool) -> None:
    machine["gpu"] = gpu
    errors = found(LINEAR, compile__enable=compiles)
    assert len(errors) == (compiles and not gpu)
    for error in errors:
        assert "quantize.linear.float8.emulate is true" in error
        assert "compile.enable = false" in error


def test_experts_in_float8_have_no_pipeline() -> None:
    (error,) = found(GROUPED, parallelism__pipeline_parallel_degree=2)
    assert "parallelism.pipeline_parallel_degree is 2" in error
    assert found(GROUPED, parallelism__pipeline_parallel_degree=1) == []
