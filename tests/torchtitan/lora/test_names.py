"""Which layers get an adapter, by words of their names, and how fast adapters learn."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchtitan.config import Optimizer
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan.lora import Lora
from torchtitan.lora.adapters import adapter_shapes, chosen_layers, linear_layers, with_adapters

MODEL = nn.ModuleDict(
    {
        "embed": nn.Embedding(3, 4),
        "0": nn.ModuleDict({"wq": nn.Linear(4, 6), "sub": nn.ModuleDict({"w": nn.Linear(6, 4)})}),
        "output": nn.Linear(4, 3),
    }
)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], ["0.wq", "0.sub.w"]),
        (["wq"], ["0.wq"]),
        (["sub.w", "output"], ["0.sub.w", "output"]),
        (["0.wq"], ["0.wq"]),
        (["q_proj", "lm_head"], ["0.wq", "output"]),
        (["model.0.q_proj"], ["0.wq"]),
        (["all-linear"], ["0.wq", "0.sub.w"]),
        (["q", "sub", "embed"], []),
    ],
)
def test_words_name_layers(targets: list[str], expected: list[str]) -> None:
    layers = linear_layers(MODEL)
    assert layers == ["0.wq", "0.sub.w", "output"]
    assert chosen_layers(layers, targets) == expected


def test_shapes_of_adapters() -> None:
    assert adapter_shapes(MODEL, ["0.wq"], 2) == {
        "0.wq.lora_A.default.weight": (2, 4),
        "0.wq.lora_B.default.weight": (6, 2),
    }


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
