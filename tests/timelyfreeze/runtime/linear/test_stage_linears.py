"""Linear layers in 16 bits under real schedules, against casts in torch's own graph."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    V_SHAPED,
    WIDTH,
    Checkpointed,
    Masks,
    Pipeline,
    expected,
    modules_for,
    random_masks,
    uniform_masks,
)
from tests.timelyfreeze.runtime.low_rank.test_stage import covered, wanted_gradients
from timelyfreeze.runtime.linear import joined_output, keep_copies, lean_linears, linears_of
from timelyfreeze.runtime.low_rank import first_basis

pytestmark = pytest.mark.usefixtures("one_rank")
BF16 = torch.bfloat16


class Gated(nn.Module):
    """Two layers of one input, one of them with a bias, and one of their product."""

    linear_groups = (("gate", "up"),)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7, bias=False)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        joined = joined_output((self.gate, self.up), hidden)
        parts = (self.gate(hidden), self.up(hidden)) if joined is None else joined.chunk(2, dim=-1)
        return hidden + self.down(torch.tanh(parts[0]) * parts[1])


class CastLinear(nn.Linear):
    """The definition: casts of input, weight and bias in the graph, float32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(BF16)
        return F.linear(x.to(BF16), self.weight.to(BF16), bias)


def some_modules(schedule: type) -> list[nn.Module]:
    torch.manual_seed(3)
    modules = [module for part in modules_for(FULL) for module in [part, Gated()]][:-1]
    if schedule in SINGLE:
        return [nn.Sequential(*modules)]
    if schedule in V_SHAPED:
        return [nn.Sequential(*modules[:4]), nn.Sequential(*modules[4:])]
    return [nn.Sequential(*modules[i : i + 2]) for i in range(0, 8, 2)]


def cast(modules: list[nn.Module]) -> list[nn.Module]:
    found = copy.deepcopy(modules)
    for module in found:
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = CastLinear
    return found


def run(modules: list[nn.Module], schedule: type, masks: Masks, **options: Any) -> Any:
    for module in modules:
        lean_linears(module, BF16)
    pipeline = Pipeline(modules, schedule, **options)
    with keep_copies(modules):
        ran = pipeline.run(masks)
    return pipeline, ran


def assert_close(ours: Any, theirs: Any) -> None:
    """Equal but for what 16 bits leave of the largest element; None where None is expected."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = [ours[key] for key in theirs], list(theirs.values())
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, list):
            assert_close(one, other)
        elif one is None or other is None:
            assert one is other
        else:
            scale = other.abs().max().item()
            torch.testing.assert_close(one.float(), other.float(), rtol=0.0, atol=0.03 * scale)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("schedule", EVERY)
def test_gradients_are_those_of_casts_in_the_graph(schedule: type, ratio: float) -> None:
    modules = some_modules(schedule)
    oracle, masks = cast(modules), random_masks(modules, 3, ratio)
    _, ran = run(modules, schedule, masks)
    wanted = expected(oracle, ran.executed, masks)
    assert_close(ran.gradients, wanted.gradients)
    assert_close(ran.sent, wanted.sent)
    live = [g for stage in ran.gradients for g in stage if g is not None]
    assert all(g.dtype == torch.float32 for g in live)
    assert (len(live) == 0) == (ratio == 1.0)


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_recomputed_blocks_give_the_same(schedule: type) -> None:
    modules = some_modules(schedule)
    oracle, masks = cast(modules), random_masks(modules, 4, 0.5)
    wrapped = [modules[0], *map(Checkpointed, modules[1:])]
    assert len(wrapped) > 1
    _, ran = run(wrapped, schedule, masks)
    assert_close(ran.gradients, expected(oracle, ran.executed, masks).gradients)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_nothing_in_front_of_what_is_live_is_computed(per_tensor: bool) -> None:
    """The first stage has one live weight, in its first linear layer or in its last."""
    counts = {}
    for live in ("0.0.linear.weight", "1.down.weight"):
        modules = some_modules(FULL)
        masks = uniform_masks(modules, True)
        names = [name for name, _ in modules[0].named_parameters()]
        assert live in names
        for mask in masks[0].values():
            mask[names.index(live)] = False
        oracle = cast(modules)
        with Products() as products:
            _, ran = run(modules, FULL, masks, per_tensor=per_tensor)
        assert_close(ran.gradients, expected(oracle, ran.executed, masks).gradients)
        counts[live] = products.n
    assert per_tensor == (counts["0.0.linear.weight"] == counts["1.down.weight"])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("schedule", EVERY)
def test_frozen_microbatches_give_the_part_that_lies_in_the_subspace(
    schedule: type, ratio: float
) -> None:
    modules = some_modules(schedule)
    masks = together(modules, covered(modules, random_masks(modules, 5, ratio)))
    oracle = cast(modules)
    pipeline, ran = run(modules, schedule, masks, gradient_rank=2)
    wanted = wanted_gradients(oracle, ran, masks, pipeline.stages)
    found = [gradient for of_stage in ran.gradients for gradient in of_stage]
    assert_close(found, wanted)


def together(modules: list[nn.Module], masks: Masks) -> Masks:
    """Masks in which layers of one input are frozen as one."""
    for stage, module in enumerate(modules):
        names = [name for name, _ in module.named_parameters()]
        for mask in masks[stage].values():
            for i, name in enumerate(names):
                if name.endswith("up.weight") and name.replace("up", "gate") in names:
                    mask[i] = mask[names.index(name.replace("up", "gate"))]
    return masks


def test_layers_of_one_input_are_frozen_together_and_share_a_subspace() -> None:
    modules = some_modules(FULL)
    pipeline, _ = run(modules, FULL, uniform_masks(modules, False), gradient_rank=2)
    stage = pipeline.stages[1]
    names = stage.parameter_names
    units = [{names[i] for i in unit} for unit in stage.frozen_together]
    assert {"1.gate.weight", "1.up.weight"} in units
    assert "1.up.weight" in stage.low_rank.weights
    assert "1.up.weight" not in stage.low_rank.bases
    assert stage.low_rank.bases["1.gate.weight"].shape == (WIDTH, 2)
    plain = Pipeline(some_modules(FULL), FULL)  # without subspaces each tensor is by itself
    assert plain.stages[1].frozen_together == ()


class Casts(TorchDispatchMode):
    """Counts what is made of weights of a shape in 16 bits, by whichever operation."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.n = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        makes = func in (torch.ops.aten._to_copy.default, torch.ops.aten.new_empty.default)
        if makes and out.dtype == BF16 and tuple(out.shape) == self.shape:
            self.n += 1
        return out


def test_weights_are_copied_once_a_batch_and_after_it_anew() -> None:
    module = nn.Sequential(Gated())
    linears = lean_linears(module, BF16)
    x = torch.randn(3, WIDTH)
    with Casts((14, WIDTH)) as joined, Casts((WIDTH, 7)) as single, keep_copies([module]):
        for microbatch in range(2):
            with linears.action_of(microbatch):
                module(x).sum().backward()
    assert (joined.n, single.n) == (1, 1)
    before = module(x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    assert not torch.equal(module(x), before)
    with torch.no_grad():
        assert torch.equal(module(x), module(x).detach())
    assert linears_of(module) is linears


def test_a_layer_of_a_group_may_be_called_alone() -> None:
    module = Gated()
    linears = lean_linears(module, BF16)
    linears.learn_frozen(WIDTH, partial(first_basis, seed=0))
    x = torch.randn(4, WIDTH)
    gradients = {}
    for frozen in ((), ("gate.weight", "up.weight")):
        module.zero_grad()
        with linears.action_of(0, frozen):
            module.up(x).square().sum().backward()
        linears.add_to_gradients()
        assert module.gate.weight.grad is None or not module.gate.weight.grad.any()
        gradients[frozen] = module.up.weight.grad
    # With all directions nothing is lost.
    torch.testing.assert_close(*gradients.values(), rtol=0.03, atol=0.03)


def test_masks_of_some_layers_of_a_group_keep_the_others_exact() -> None:
    module = Gated()
    oracle = cast([module])[0]
    linears = lean_linears(module, BF16)
    x = torch.randn(N_MICROBATCHES, WIDTH)
    with linears.action_of(0, ("gate.weight",)):
        module(x).square().sum().backward()
    oracle(x).square().sum().backward()
    assert module.gate.weight.grad is None
    assert_close(module.up.weight.grad, oracle.up.weight.grad)
    assert_close(module.gate.bias.grad, oracle.gate.bias.grad)
    assert np.isfinite(module.down.weight.grad.numpy()).all()
