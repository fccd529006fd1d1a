"""Compiled blocks in 16 bits, against eager ones; what graphs have, and when they are made."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.timelyfreeze.helpers.stages import (
    FULL,
    WIDTH,
    Pipeline,
    Ran,
    expected,
    make_modules,
    uniform_masks,
)
from tests.timelyfreeze.runtime.linear.test_stage_linears import assert_close as close
from tests.timelyfreeze.runtime.low_rank.test_stage import covered
from tests.timelyfreeze.runtime.test_compiled_blocks import Masks, block_masks, compiled
from timelyfreeze.runtime.linear import keep_copies, lean_linears, linears_of

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _own_code() -> Iterator[None]:
    """Forget what other tests compiled; here, blocks that are alike share what is compiled."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch.compiler.reset()


def lean_run(modules: list[nn.Module], masks: Masks, **options: Any) -> tuple[Pipeline, Ran]:
    for module in modules:
        lean_linears(module, torch.bfloat16)

    def forwarding(module: nn.Module) -> None:
        forward = module.forward

        def run(*args: Any) -> Any:
            with linears_of(module).forwarding():
                return forward(*args)

        module.forward = run

    for module in modules:
        forwarding(module)
    pipeline = Pipeline(modules, FULL, **options)
    with keep_copies(modules):
        return pipeline, pipeline.run(masks)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_gradients_in_16_bits_are_those_of_eager_blocks(ratio: float, rank: int) -> None:
    plain = make_modules()
    modules = [compiled(module) for module in copy.deepcopy(plain)]
    masks = block_masks(Pipeline(modules, FULL, gradient_rank=rank), 8, ratio)
    if rank:
        masks = covered(plain, masks)
    modules = [compiled(module) for module in copy.deepcopy(plain)]
    _, ran = lean_run(modules, masks, gradient_rank=rank)
    _, wanted = lean_run(plain, masks, gradient_rank=rank)
    close(ran.gradients, wanted.gradients)
    close(ran.sent, wanted.sent)


def graphs_of(rank: int) -> list[torch.fx.Graph]:
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    modules = [compiled(module, backend) for module in make_modules()]
    masks = uniform_masks(modules, True)
    lean_run(modules, covered(make_modules(), masks) if rank else masks, gradient_rank=rank)
    return graphs


@pytest.mark.parametrize("rank", [0, 2])
def test_no_graph_casts_a_weight_or_keeps_a_copy_of_one(rank: int) -> None:
    """A copy comes into the graph, and what is kept of it is that input itself."""
    graphs = graphs_of(rank)
    assert len(graphs) >= 4  # forward and backward of each variant
    for graph in graphs:
        inputs = {node for node in graph.nodes if node.op == "placeholder"}
        for node in graph.nodes:
            value = node.meta.get("val")
            made = node.op == "call_function" and isinstance(value, Tensor)
            if made and node.target is torch.ops.aten._to_copy.default:
                source = node.args[0]
                is_weight = source in inputs and tuple(source.meta["val"].shape) == (WIDTH, WIDTH)
                assert not is_weight, f"{node} casts {source}"


def test_both_variants_are_compiled_by_the_first_forward() -> None:
    torch.compiler.reset()
    n_compiled = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        n_compiled.append(module)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    modules = [compiled(module, backend) for module in make_modules()]
    pipeline = Pipeline(modules, FULL, gradient_rank=2)
    gradients = copy.deepcopy(pipeline.run().gradients)
    expected_gradients = expected(make_modules(), pipeline.run().executed).gradients
    torch.testing.assert_close(gradients, expected_gradients)  # the other variant left nothing
    before = len(n_compiled)
    assert before > 0
    pipeline.run(covered(make_modules(), uniform_masks(modules, True)))
    assert len(n_compiled) == before


def test_copies_for_compiled_blocks_are_made_once_a_batch_and_outside_of_it_anew() -> None:
    plain = make_modules()[1]
    block = compiled(copy.deepcopy(plain))
    linears, x = lean_linears(block, torch.bfloat16), torch.randn(3, WIDTH)
    lean_linears(plain, torch.bfloat16)
    layer = linears._compiled[0]

    def output() -> Tensor:
        with torch.no_grad(), linears.forwarding():
            found: Tensor = block(x)
        return found

    output()
    with torch.no_grad():
        for parameter in (*plain.parameters(), *block.parameters()):
            parameter.mul_(2.0)
    close(output(), plain(x).detach())
    with keep_copies([block]):
        output()
        kept = layer.copy
        output()
        assert layer.copy is kept is not None
    assert layer.copy is None
