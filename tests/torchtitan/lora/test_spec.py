"""Adapters' own learning rate reaches the optimizers of the stages that learn."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchtitan.config import Optimizer
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan.lora import Lora
from torchtitan.lora.spec import with_adapters


@pytest.mark.parametrize(("given", "expected"), [(None, 3e-3), (5e-4, 5e-4)])
def test_rate_of_adapters(given: float | None, expected: float) -> None:
    asked: list[Any] = []

    def build(parts: list[nn.Module], config: Optimizer, *args: Any, **more: Any) -> None:
        asked.extend([parts, config.lr, config.weight_decay, args, more])

    spec = TrainSpec(
        **{**dict.fromkeys(TrainSpec.__dataclass_fields__), "build_optimizers_fn": build}
    )
    live, still = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    config, dims = Optimizer(lr=3e-4, weight_decay=0.2), SimpleNamespace()
    ours = with_adapters(spec, Lora(learning_rate=given), 0)
    ours.build_optimizers_fn([live, still], config, dims, ft_manager=None)
    assert asked == [[live], pytest.approx(expected), 0.2, (dims,), {"ft_manager": None}]
    assert config.lr == 3e-4
