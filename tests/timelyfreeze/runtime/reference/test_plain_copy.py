"""Copies of wrapped blocks compute what the blocks do, and can go to another process."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.timelyfreeze.helpers.layered import Layer
from timelyfreeze.runtime.linear import lean_linears
from timelyfreeze.runtime.reference.capture import plain_copy

pytestmark = pytest.mark.usefixtures("one_rank")

INPUT = torch.linspace(-1, 1, 10).reshape(2, 5)
SCALE = torch.tensor([1.5])


def weights(block: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters, by the names that an unwrapped block has."""
    found = {}
    for name, parameter in block.named_parameters():
        plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[plain] = whole.detach().clone()
    return found


def sharded(block: nn.Module) -> nn.Module:
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    return block


WRAPPERS: dict[str, Any] = {
    "plain": lambda block: block,
    "checkpointed": checkpoint_wrapper,
    "compiled": lambda block: torch.compile(block, backend="eager"),
    "sharded": sharded,
    "all": lambda block: sharded(torch.compile(checkpoint_wrapper(block), backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_copy_computes_what_its_block_does(wrap: Any) -> None:
    torch.manual_seed(3)
    block = Layer()
    wanted = block(INPUT, SCALE).detach()
    called: list[str] = []
    block.register_forward_hook(lambda *hooked: called.append("hook"))
    wrapped = wrap(block)
    copied = plain_copy(wrapped, weights(wrapped))
    copied = pickle.loads(pickle.dumps(copied))
    assert type(copied) is Layer
    assert torch.equal(copied(INPUT, SCALE), wanted)
    assert called == [], "hooks stay where they are"
    assert not copied.training
    assert not any(p.requires_grad for p in copied.parameters())
    assert copied.tied.weight is copied.up.weight


def test_a_copy_has_weights_of_its_own() -> None:
    block = Layer()
    copied = plain_copy(block, weights(block))
    before = copied(INPUT, SCALE)
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.add_(1.0)
    assert torch.equal(copied(INPUT, SCALE), before)
    assert not torch.equal(block(INPUT, SCALE), before)


def test_what_cannot_be_copied_is_named() -> None:
    block = Layer()
    block.lock = __import__("threading").Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Layer has lock, a lock, which cannot be copied"):
        plain_copy(block, weights(block))


def test_layers_of_a_16_bit_stage_are_plain_ones_in_the_copy() -> None:
    block = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    weights = {name: p.detach() for name, p in block.named_parameters()}
    x = torch.randn(2, 3)
    wanted = block(x)
    lean_linears(block, torch.bfloat16)
    copied = plain_copy(block, weights)
    assert [type(layer) for layer in copied] == [nn.Linear, nn.Linear]
    assert all(set(vars(layer)) == set(vars(nn.Linear(1, 1))) for layer in copied)
    assert torch.equal(copied(x), wanted)
