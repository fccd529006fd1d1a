"""Which layers get an adapter, by words of their names."""

import pytest
from torch import nn

from torchtitan.lora.names import adapter_shapes, chosen_layers, linear_layers

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
