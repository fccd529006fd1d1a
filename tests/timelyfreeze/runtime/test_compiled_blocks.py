"""Compiled blocks, frozen whole or not at all, against eager modules with the same masks."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SINGLE,
    WIDTH,
    Block,
    Checkpointed,
    Pipeline,
    Ran,
    assert_equal,
    expected,
    make_modules,
    modules_for,
    shard,
    uniform_masks,
    whole,
)
from tests.timelyfreeze.runtime.low_rank.test_stage import covered, wanted_gradients

Masks = dict[int, dict[int, np.ndarray]]


pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _own_code() -> Iterator[None]:
    """Forget what other tests compiled; here, blocks that are alike share what is compiled."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch.compiler.reset()


def compiled(module: nn.Module, backend: Any = "aot_eager") -> nn.Module:
    """The module with each of its blocks compiled, as upstream does."""
    if isinstance(module, (Block, Checkpointed)):
        return torch.compile(module, backend=backend, fullgraph=True)
    for name, child in module.named_children():
        module.register_module(name, compiled(child, backend))
    return module


def recomputing(module: nn.Module) -> nn.Module:
    if isinstance(module, Block):
        return Checkpointed(module)
    for name, child in module.named_children():
        module.register_module(name, recomputing(child))
    return module


def block_masks(pipeline: Pipeline, seed: int, ratio: float) -> Masks:
    """Blocks frozen whole or not at all, every other tensor by itself."""
    rng = np.random.default_rng(seed)
    masks: Masks = {}
    for stage in pipeline.stages:
        for microbatch in range(N_MICROBATCHES):
            mask = rng.random(len(stage.parameter_names)) < ratio
            for block in stage.frozen_together:
                mask[list(block)] = rng.random() < ratio
            masks.setdefault(stage.stage_index, {})[microbatch] = mask
    return masks


def run_both(
    modules: list[nn.Module],
    schedule: type,
    *,
    seed: int,
    ratio: float,
    prepare: Callable[[list[nn.Module]], None] = lambda modules: None,
    **options: Any,
) -> tuple[Ran, Ran]:
    """What a pipeline with compiled blocks gives, and a plain chain of the same modules."""
    plain = copy.deepcopy(modules)
    modules = [compiled(module) for module in modules]
    prepare(modules)
    pipeline = Pipeline(modules, schedule, **options)
    assert any(stage.frozen_together for stage in pipeline.stages)
    masks = block_masks(pipeline, seed, ratio)
    ran = pipeline.run(masks)
    assert all(p.requires_grad for module in modules for p in module.parameters())
    return ran, expected(plain, ran.executed, masks)


@pytest.mark.parametrize("schedule", [FULL, *SINGLE])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
def test_gradients_are_those_of_eager_blocks_with_the_same_masks(
    schedule: type, ratio: float
) -> None:
    ran, wanted = run_both(modules_for(schedule), schedule, seed=3, ratio=ratio)
    assert_equal(ran, wanted)
    n_live = sum(g is not None for stage in ran.gradients for g in stage)
    assert (n_live == 0) == (ratio == 1.0)


def test_gradients_stay_right_where_blocks_are_recomputed() -> None:
    modules = [recomputing(module) for module in make_modules()]
    assert_equal(*run_both(modules, FULL, seed=4, ratio=0.5))


def test_gradients_stay_right_where_the_chain_of_the_first_stage_is_kept() -> None:
    assert_equal(*run_both(make_modules(), FULL, seed=5, ratio=0.8, per_tensor=True))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_gradients_stay_right_under_fsdp(reshard_after_forward: bool) -> None:
    def shard_all(modules: list[nn.Module]) -> None:
        shard(modules, reshard_after_forward=reshard_after_forward)

    ran, wanted = run_both(make_modules(), FULL, seed=6, ratio=0.6, prepare=shard_all)
    ran.gradients = whole(ran.gradients)
    assert_equal(ran, wanted)


def test_stages_in_front_that_are_frozen_whole_run_no_backward() -> None:
    modules = make_modules()
    plain = copy.deepcopy(modules)
    modules = [compiled(module) for module in modules]
    masks = uniform_masks(modules, False)
    for stage in (0, 1):
        masks[stage] = uniform_masks(modules, True)[stage]
    cut = [range(N_MICROBATCHES), range(N_MICROBATCHES), (), ()]
    ran = Pipeline(modules, FULL).run(masks, cut=cut)
    wanted = expected(plain, ran.executed, masks)
    assert all(not sent.any() for (stage, _), sent in ran.sent.items() if stage == 1)
    ran.sent = wanted.sent
    assert_equal(ran, wanted)


# -- frozen blocks that learn in a subspace --------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("prepared", [lambda module: module, recomputing])
def test_frozen_blocks_give_the_part_that_lies_in_their_subspaces(
    prepared: Callable[[nn.Module], nn.Module], ratio: float
) -> None:
    modules = [prepared(module) for module in make_modules()]
    plain = copy.deepcopy(modules)
    pipeline = Pipeline([compiled(module) for module in modules], FULL, gradient_rank=2)
    masks = covered(plain, block_masks(pipeline, 8, ratio))
    once = pipeline.run(masks)
    wanted = wanted_gradients(plain, once, masks, pipeline.stages)
    found = [gradient for of_stage in once.gradients for gradient in of_stage]
    torch.testing.assert_close(found, wanted)
    once = copy.deepcopy(once.gradients)
    for stage in pipeline.stages:  # directions are no part of what is compiled
        stage.low_rank.bases = {name: -q for name, q in stage.low_rank.bases.items()}
    twice = pipeline.run(masks).gradients
    torch.testing.assert_close(twice, [[2 * g for g in of_stage] for of_stage in once])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_subspaces_of_compiled_blocks_are_those_of_gathered_weights() -> None:
    gradients = []
    for is_sharded in (False, True):
        modules = [compiled(module) for module in make_modules()]
        if is_sharded:
            shard(modules, reshard_after_forward=False)
        pipeline = Pipeline(modules, FULL, gradient_rank=2)
        masks = covered(make_modules(), block_masks(pipeline, 9, 0.5))
        found = pipeline.run(masks).gradients
        gradients.append(whole(found) if is_sharded else found)
    torch.testing.assert_close(gradients[1], gradients[0])


class Thin(nn.Module):
    """A layer with fewer outputs than inputs, which are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3),
            nn.Linear(3, WIDTH),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(self.down(self.norm(hidden).float()))


def test_products_in_subspaces_are_those_of_eager_blocks_under_autocast() -> None:
    modules = make_modules()
    modules[1:3] = Thin(), Thin()
    gradients = []
    for is_compiled in (False, True):
        own = copy.deepcopy(modules)
        if is_compiled:
            own[1:3] = (
                torch.compile(thin, backend="aot_eager", fullgraph=True) for thin in own[1:3]
            )
        pipeline = Pipeline(own, FULL, gradient_rank=2)
        masks = covered(modules, uniform_masks(modules, True))
        with torch.autocast("cpu", torch.bfloat16):
            gradients.append(pipeline.run(masks).gradients)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.02, atol=0.02)


def test_what_was_compiled_in_place_is_refused() -> None:
    modules = make_modules()
    modules[1].compile(backend="aot_eager")
    with pytest.raises(ValueError, match=r"compiled in place.*gradient_rank.* 2 it must be what"):
        Pipeline(modules, FULL, gradient_rank=2)


# -- what is computed ------------------------------------------------------------------------------


def test_the_variant_of_a_frozen_block_has_no_weight_gradient() -> None:
    products: list[int] = []  # of the backward of each variant

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        matrix = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        products.append(sum(node.target in matrix for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=count
    )
    modules = [compiled(module, backend) for module in make_modules()]
    pipeline = Pipeline(modules, FULL)
    half = {m: np.full(len(pipeline.stages[1].parameter_names), m % 2 == 0) for m in range(4)}
    pipeline.run({1: half})
    # A block has three products; each has one for its input's gradient, and one for its weight's.
    # Stages that are not alike in what they are given share the variants all the same.
    assert sorted(products) == [3, 6]


# -- requires_grad ---------------------------------------------------------------------------------


def watched(stage: Any, seen: list[bool]) -> None:
    """Note for each microbatch whether the block's parameters require gradients as it runs."""
    (block,) = stage._blocks._blocks

    def note(module: nn.Module, inputs: Any) -> None:
        flags = {p.requires_grad for p in module.parameters()}
        assert len(flags) == 1
        seen.append(flags.pop())

    block.register_forward_pre_hook(note)


def one_compiled_block() -> tuple[list[nn.Module], Pipeline]:
    modules = make_modules()
    modules[1] = compiled(modules[1])
    pipeline = Pipeline(modules, FULL)
    pipeline.run()  # with torch's shape inference in it
    return modules, pipeline


def test_only_the_microbatches_that_freeze_a_block_run_it_without_gradients() -> None:
    modules, pipeline = one_compiled_block()
    n = len(pipeline.stages[1].parameter_names)
    seen: list[bool] = []
    watched(pipeline.stages[1], seen)
    pipeline.run({1: {0: np.full(n, True), 2: np.full(n, True)}})
    assert seen == [False, True, False, True]
    assert all(p.requires_grad for p in modules[1].parameters())


def test_a_forward_that_keeps_no_graph_leaves_requires_grad_alone() -> None:
    modules, pipeline = one_compiled_block()
    masks = {stage: uniform_masks(modules, True)[stage] for stage in (0, 1)}
    seen: list[bool] = []
    watched(pipeline.stages[1], seen)
    every = range(N_MICROBATCHES)
    pipeline.run(masks, cut=[every, every, (), ()])
    assert seen == [True] * 4


def test_an_error_inside_a_frozen_block_leaves_its_parameters_as_they_were() -> None:
    modules, pipeline = one_compiled_block()
    stage = pipeline.stages[1]
    (block,) = stage._blocks._blocks

    def fail(module: nn.Module, inputs: Any) -> None:
        assert not any(p.requires_grad for p in module.parameters())
        raise FloatingPointError("from inside")

    hook = block.register_forward_pre_hook(fail)
    mask = np.full(len(stage.parameter_names), True)
    with pytest.raises(RuntimeError, match=r"Stage 1\] failed to run forward") as raised:
        pipeline.run({1: {0: mask}})
    assert isinstance(raised.value.__cause__, FloatingPointError)
    assert all(p.requires_grad for p in modules[1].parameters())
    hook.remove()
    stage.freeze_nothing()
    block(torch.zeros(1, 5)).sum().backward()
    assert all(p.grad is not None for p in modules[1].parameters())


# -- which blocks there are ------------------------------------------------------------------------


def test_tensors_of_a_compiled_block_are_frozen_together_and_others_alone() -> None:
    modules = [compiled(module) for module in make_modules()]
    stages = Pipeline(modules, FULL).stages
    for stage, n_around in zip(stages, [3, 0, 0, 4], strict=True):
        (block,) = stage.frozen_together
        assert len(block) == len(stage.parameter_names) - n_around
    names = stages[0].parameter_names
    assert {names[i].split(".")[0] for i in stages[0].frozen_together[0]} == {"1"}


def test_what_is_applied_is_told_as_a_fraction_of_elements() -> None:
    modules = [compiled(module) for module in make_modules()]
    pipeline = Pipeline(modules, FULL)
    stage = pipeline.stages[0]
    mask = np.zeros(len(stage.parameter_names), dtype=np.bool_)
    mask[list(stage.frozen_together[0])] = True
    pipeline.run({0: {1: mask}})
    # A norm of 5 and 5, two matrices of 25 with a bias of 5 each; in front 13 x 5, 25 and 5.
    assert stage.applied_ratios == {0: 0.0, 1: 70 / (70 + 95), 2: 0.0, 3: 0.0}
