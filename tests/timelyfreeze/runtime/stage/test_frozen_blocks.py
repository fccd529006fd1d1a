"""The frozen first blocks of a stage that has live ones too: same gradients, nothing kept."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    Block,
    Head,
    Pipeline,
    make_batch,
    shard,
    sum_loss,
)
from tests.timelyfreeze.runtime.stage.test_entry import Part, is_in_front, step
from timelyfreeze.runtime.entering.stage import FrozenBlocks
from timelyfreeze.runtime.shards import local_part

pytestmark = pytest.mark.usefixtures("one_rank")


def plain_step(modules: list[Part], depth: int) -> list[Tensor | None]:
    """The oracle: the whole model in one graph, what is frozen without a gradient."""
    named = [(n, p) for module in modules for n, p in module.named_parameters()]
    for name, parameter in named:
        parameter.grad = None
        parameter.requires_grad_(not is_in_front(name, depth))
    tokens, labels = make_batch()
    for rows, wanted in zip(
        tokens.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True
    ):
        hidden = rows
        for module in modules:
            hidden = module(hidden)
        sum_loss(hidden, wanted).backward()
    found = [parameter.grad for _, parameter in named]
    for _, parameter in named:
        parameter.requires_grad_(True)
        parameter.grad = None
    return found


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("depth", [1, 3, 5, 7])
def test_frozen_blocks_beside_live_ones_have_no_graph(schedule: type, depth: int) -> None:
    torch.manual_seed(0)
    modules = [Part(stage) for stage in range(4)]
    pipeline = Pipeline(modules, schedule)
    step(pipeline, None, 0)  # torch infers shapes with a first pass of its own
    has_graph = Counter[str]()
    for module in modules:
        for name, block in module.layers.items():
            block.register_forward_hook(
                lambda _, args, out, name=name: has_graph.update([name] * out.requires_grad)
            )
    found = step(pipeline, None, depth)[N_MICROBATCHES:]
    by_stages = dict(has_graph)
    torch.testing.assert_close(found, plain_step(modules, depth))
    assert by_stages == {str(block): N_MICROBATCHES for block in range(depth, 8)}
    names = [name for module in modules for name, _ in module.named_parameters()]
    assert [g is None for g in found] == [is_in_front(name, depth) for name in names]
    has_graph.clear()
    step(pipeline, None, 0)
    assert has_graph["0"] == N_MICROBATCHES  # live again
    assert all("forward" not in vars(b) for module in modules for b in module.layers.values())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize("depth", [1, 2])
def test_under_fsdp_gradients_are_the_same(schedule: type, depth: int) -> None:
    """Also after a step in which the front, live again, has a graph."""

    def part() -> Part:
        torch.manual_seed(0)
        module = Part(0)
        module.layers["2"], module.head = Block(), Head()
        return module

    plain, sharded = part(), part()
    shard([sharded])
    pipelines = [Pipeline([module], schedule) for module in (plain, sharded)]
    for frozen in (depth, 0, depth):
        expected, found = (step(pipeline, None, frozen) for pipeline in pipelines)
        local = [None if t is None else local_part(t) for t in found]
        torch.testing.assert_close(local, expected)


def test_a_block_with_a_live_tensor_ends_the_front() -> None:
    module = Part(0)
    names = [name for name, _ in module.named_parameters()]
    blocks = FrozenBlocks(module, names)

    def first(*live: str) -> list[torch.nn.Module]:
        return blocks.first(np.array([not name.startswith(live) for name in names]))

    embedding, one, two = module.tok_embeddings, module.layers["0"], module.layers["1"]
    assert first("head") == [embedding, one, two]
    assert first("layers.1") == [embedding, one]
    assert first("layers.0") == [embedding]
    assert first("tok_embeddings") == []
    biases = [name for name in names if name.startswith("layers.1") and name.endswith("bias")]
    assert first(biases[-1]) == [embedding, one]


def test_a_block_gets_the_forward_back_that_it_had() -> None:
    """A trainer may have set one of its own; the other is its class's."""
    module = Part(0)
    names = [name for name, _ in module.named_parameters()]
    own = module.layers["0"].forward = module.layers["0"].forward
    with FrozenBlocks(module, names).without_graph(np.ones(len(names), dtype=np.bool_)):
        assert not module(make_batch()[0][:2]).requires_grad
    assert [vars(block).get("forward") for block in module.layers.values()] == [own, None]
