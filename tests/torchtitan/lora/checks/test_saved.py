"""Checkpoints of other adapters are told before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchtitan.helpers.checkpoints import save
from tests.torchtitan.helpers.job_configs import config as plain_config
from torchtitan.checkpoints.settings import save_settings
from torchtitan.lora.checks.saved import adapter_errors
from torchtitan.lora.checks.section import plain_model
from torchtitan.lora.names import adapter_shapes, linear_layers


def config(**changes: Any) -> Any:
    return plain_config(**{"freezing__method": "lora", "model__flavor": "debugmodel", **changes})


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
