"""Adapters that a stage computes itself, against peft's own forward.

In float32, since the noise of 16 bits would hide what is compared.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    SPLIT,
    Pipeline,
    make_batch,
    sum_loss,
)
from tests.timelyfreeze.runtime.linear.test_stage_linears import (
    Products,
    some_modules,
)
from timelyfreeze.runtime.linear import keep_copies, lean_linears
from torchtitan.lora import Lora
from torchtitan.lora.adapters import UP, add_adapters

pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]  # peft takes seconds to import


def with_adapters(schedule: type) -> list[nn.Module]:
    modules = some_modules(schedule)
    for module in modules:
        module.init_weights = lambda: None
        add_adapters(module, Lora(rank=2), 0)
        for name, tensor in module.named_parameters():
            if tensor.is_meta:
                layer, _, attribute = name.rpartition(".")
                values = nn.Parameter(0.3 * torch.randn(tensor.shape))
                setattr(module.get_submodule(layer), attribute, values)
    return modules


def by_peft(modules: list[nn.Module]) -> list[Any]:
    modules = copy.deepcopy(modules)
    tokens, labels = make_batch()
    hidden = tokens
    for module in modules:
        hidden = module(hidden)
    sum_loss(hidden, labels).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


@pytest.mark.parametrize("schedule", EVERY)
def test_they_learn_what_pefts_do(schedule: type) -> None:
    modules = with_adapters(schedule)
    wanted = by_peft(modules)
    for module in modules:
        lean_linears(module, torch.float32)
    pipeline = Pipeline(modules, schedule)
    with keep_copies(modules):
        ran = pipeline.run()
    torch.testing.assert_close(ran.gradients, wanted, rtol=1e-4, atol=1e-4)
    learning = [p for module in modules for p in module.parameters() if p.requires_grad]
    assert len(learning) > 20
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in learning)


def test_the_weight_half_has_the_products_of_gradients() -> None:
    counts = {}
    for schedule in (FULL, SPLIT):
        modules = with_adapters(schedule)
        for module in modules:
            lean_linears(module, torch.float32)
        with Products() as products, keep_copies(modules):
            Pipeline(modules, schedule).run()
        counts[schedule] = products.n
    assert counts[FULL] == counts[SPLIT]


def test_names_and_values_in_a_checkpoint_are_pefts() -> None:
    modules = with_adapters(FULL)
    before = [dict(module.state_dict()) for module in modules]
    for module in modules:
        lean_linears(module, torch.float32)
    after = [module.state_dict() for module in modules]
    assert [list(state) for state in before] == [list(state) for state in after]
    assert any(name.endswith(UP) for name in after[1])
