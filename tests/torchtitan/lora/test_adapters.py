"""Adapters in the stages of a model: names, first values, types, and what learns.

The oracle of values is peft's own layer; names are written out.
"""

import math
import re

import pytest
import torch
from torch import nn
from torchtitan.models.llama3 import Transformer
from torchtitan.models.llama3.model.args import TransformerModelArgs

pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")

from torchtitan.lora import Lora
from torchtitan.lora.adapters import add_adapters

pytestmark = pytest.mark.slow  # peft takes seconds to import

ARGS = TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=128)
Q = "layers.1.attention.wq"


def adapted(
    settings: Lora | None = None, *, layers: tuple[str, ...] = ("0", "1"), seed: int = 3, **more
) -> Transformer:
    """A model as a trainer builds it; of a stage that has these layers alone."""
    with torch.device("meta"):
        model = Transformer(ARGS)
    for name in set(model.layers) - set(layers):
        del model.layers[name]
    add_adapters(model, settings or Lora(rank=4), seed, **more)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model


def test_a_checkpoint_has_the_names_of_the_plain_model_and_those_of_adapters() -> None:
    with torch.device("meta"):
        plain = set(Transformer(ARGS).state_dict())
    names = set(adapted().state_dict())
    layers = {name.removesuffix(".weight") for name in plain if re.search(r"\.w\w\.", name)}
    assert len(layers) == 14
    ends = ("lora_A.default.weight", "lora_B.default.weight")
    assert names == plain | {f"{layer}.{end}" for layer in layers for end in ends}


def test_weights_of_the_plain_model_are_taken() -> None:
    torch.manual_seed(0)
    plain, model = Transformer(ARGS), adapted()
    with torch.no_grad():
        plain.init_weights()
    left = model.load_state_dict(plain.state_dict(), strict=False)
    assert left.unexpected_keys == []
    assert all("lora_" in name for name in left.missing_keys)
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in plain.state_dict().items())
    tokens = torch.arange(16).reshape(1, 16)
    assert torch.equal(model(tokens), plain(tokens)), "what goes up is zero at first"


def test_first_values_follow_from_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    whole = adapted().state_dict()
    torch.manual_seed(2)
    part = adapted(layers=("1",)).state_dict()
    adapters = [name for name in part if "lora_" in name]
    assert len(adapters) == 14
    assert all(torch.equal(whole[name], part[name]) for name in adapters)
    other = adapted(seed=4).state_dict()
    down = [name for name in adapters if "lora_A" in name]
    assert not any(torch.equal(whole[name], other[name]) for name in down)
    assert not torch.equal(
        whole[f"{Q}.lora_A.default.weight"], whole[f"{Q[:-1]}k.lora_A.default.weight"]
    )


def test_first_values_are_spread_as_those_of_peft() -> None:
    state = adapted(Lora(rank=512)).state_dict()
    values = state[f"{Q}.lora_A.default.weight"]
    bound = 1 / math.sqrt(ARGS.dim)  # of kaiming's uniform numbers with a = sqrt(5)
    assert 0.99 * bound < float(values.abs().max()) <= bound
    assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not state[f"{Q}.lora_B.default.weight"].any()


def test_nothing_but_adapters_learns() -> None:
    for model in (adapted(), adapted(Lora(targets=["w9"]))):
        learning = {name for name, p in model.named_parameters() if p.requires_grad}
        assert learning == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_under_autocast_frozen_layers_are_of_its_type() -> None:
    model = adapted(autocast=torch.bfloat16)
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    linear = {name for name in dtypes if "base_layer" in name} | {"output.weight"}
    assert {name for name, dtype in dtypes.items() if dtype == "bfloat16"} == linear
    assert len(linear) == 15


@pytest.mark.parametrize(("settings", "scale"), [(Lora(rank=4), 2.0), (Lora(rank=4, alpha=2), 0.5)])
def test_what_an_adapter_adds_is_scaled(settings: Lora, scale: float) -> None:
    layer = adapted(settings).get_submodule(Q)
    x = torch.randn(3, ARGS.dim)
    with torch.no_grad():
        nn.init.normal_(layer.lora_B["default"].weight)
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = x @ (layer.weight + scale * up @ down).T
        torch.testing.assert_close(layer(x), expected)
