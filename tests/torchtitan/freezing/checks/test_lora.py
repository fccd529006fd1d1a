"""Errors in ``[lora]``, and checkpoints of other adapters, are told before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.torchtitan.helpers.checkpoints import save
from tests.torchtitan.helpers.job_configs import config as plain_config
from torchtitan.checkpoints.finished import save_settings
from torchtitan.freezing.checks import check, requirements
from torchtitan.freezing.checks.checkpoints import begins_with_adapters, checkpoint_errors
from torchtitan.freezing.checks.freezing import adapter_errors, plain_model
from torchtitan.lora.adapters import adapter_shapes, linear_layers


@pytest.fixture(autouse=True)
def _peft_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())


def config(**changes: Any) -> Any:
    return plain_config(**{"freezing__method": "lora", "model__flavor": "debugmodel", **changes})


@pytest.mark.parametrize("targets", [[], ["wq"], ["attention.wq", "layers.0.feed_forward.w1"]])
def test_what_the_model_has_is_taken(targets: list[str]) -> None:
    check(config(lora__targets=targets))
    check(config(lora__targets=targets, parallelism__pipeline_parallel_degree=1))


def test_a_rank_that_is_not_low_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check(config(lora__rank=256))
    assert not caplog.records
    check(config(lora__rank=257, lora__targets=["wq", "wk"]))
    (line,) = [record.message for record in caplog.records]
    start = "lora.rank is 257, above the shorter side of layers.0.attention.wq (256), layers.0."
    assert line.startswith(start)
    caplog.clear()
    planned = {"freezing__method": "timelyfreeze", "freezing__gradient_rank": [16, 300]}
    check(config(**planned))
    assert "freezing.gradient_rank is [16, 300], above the shorter side of lay" in caplog.text


def adapters(job_config: Any, rank: int) -> dict[str, torch.Tensor]:
    model = plain_model(job_config)
    layers = [name for name in linear_layers(model) if name != "output"]
    shapes = adapter_shapes(model, layers, rank)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("then", "now", "begins_anew", "words"),
    [
        ({}, {}, False, None),
        ({}, {"lora__learning_rate": 1.0}, False, None),
        ({"freezing__method": "none"}, {}, True, None),
        ({"freezing__method": "none"}, {}, False, ["freezing.method is 'lora'", "no adapters"]),
        ({}, {"freezing__method": "none"}, True, ["freezing.method is 'none' and was 'lora'"]),
        ({}, {"freezing__method": "none"}, False, ["freezing.method is 'none' and was 'lora'"]),
        (
            {},
            {"lora__rank": 8},
            True,
            ["lora.rank is 8 and was 16", "layers.0.attention.wk.lora_A"],
        ),
        ({}, {"lora__alpha": 1.0}, False, ["lora.alpha is 1.0 and was None"]),
        ({}, {"lora__targets": ["wq"]}, False, ["lora.targets is ['wq'] and was []"]),
    ],
)
def test_a_checkpoint_has_the_adapters_of_the_run(
    then: dict, now: dict, begins_anew: bool, words: list[str] | None, tmp_path: Path
) -> None:
    before, after = config(**then), config(**now)
    has = before.freezing.method == "lora"
    folder = save(tmp_path / "step-5", 5, **(adapters(before, 16) if has else {}))
    save_settings(folder, before.to_dict())
    found = list(adapter_errors(after, folder, begins_anew=begins_anew))
    if words is None:
        assert found == []
        return
    (line,) = found
    assert all(word in line for word in [*words, str(folder), "timelyfreeze export"]), line


@pytest.mark.parametrize(
    ("step", "has", "changes", "words"),
    [
        (40, True, {}, None),
        (48, True, {}, None),
        (48, False, {}, None),
        (60, False, {}, None),
        (40, True, {"lora__until": 44}, None),
        (40, True, {"freezing__method": "apf"}, None),
        (
            40,
            True,
            {"lora__until": 30},
            "lora.until is 30, and the checkpoint {} of step 40 has ad",
        ),
        (40, False, {}, "lora.until is 48, and the checkpoint {} of step 40 has no adapters"),
        (60, True, {}, "lora.until is 48, and the checkpoint {} of step 60 has adapters; keep"),
        (40, True, {"lora__until": 0}, "freezing.method is 'none': the checkpoint {} has adapters"),
        (40, True, {"lora__rank": 8}, "lora.rank is 8 and was 16: the checkpoint {} has adapters"),
    ],
)
def test_a_checkpoint_belongs_to_a_half_of_a_run(
    step: int, has: bool, changes: dict, words: str | None, tmp_path: Path
) -> None:
    then = {"lora__until": 48, "freezing__method": "none", "job__dump_folder": str(tmp_path)}
    before = config(**then, checkpoint__enable=True)
    after = config(**{**then, **changes}, checkpoint__enable=True)
    own = {name: torch.zeros(shape) for name, shape in plain_shapes(before).items()}
    states = {"train_state": {"step": step}, "optimizer": {"state.x": torch.ones(3)}}
    states |= adapters(before, 16) if has else {}
    folder = tmp_path / "checkpoint" / f"step-{step}"
    dcp.save({**own, **states}, checkpoint_id=folder, no_dist=True)
    save_settings(folder, before.to_dict())
    found = list(checkpoint_errors(after))
    if words is None:
        assert found == []
        assert begins_with_adapters(after) == has
        return
    (line,) = found
    assert line.startswith(words.format(repr(str(folder)))), line


def plain_shapes(job_config: Any) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in plain_model(job_config).state_dict().items()}


def test_a_run_from_weights_alone_begins_with_adapters(tmp_path: Path) -> None:
    run = {"lora__until": 48, "freezing__method": "none", "job__dump_folder": str(tmp_path)}
    assert begins_with_adapters(config(**run, checkpoint__enable=True))
    assert begins_with_adapters(config(**run))
