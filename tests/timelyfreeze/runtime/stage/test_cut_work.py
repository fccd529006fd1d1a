"""Work and memory of stages behind a frozen front: nothing is computed or kept that nobody needs.

Most cases freeze the first tensors of the model, in the order of its parameters. What a backward
has to compute is counted by hand.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.timelyfreeze.helpers.fronts import freeze_front, run_cut
from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SPLIT,
    VOCABULARY,
    WIDTH,
    Embedding,
    Head,
    Pipeline,
    make_modules,
)

pytestmark = pytest.mark.usefixtures("one_rank")

TALL = (31, 37, 41, 43)
ROWS = 6  # of a microbatch: 2 sequences of 3 tokens


class Tall(nn.Module):
    """Two matrices whose products have shapes that no other stage's have; four tensors."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, height)
        self.down = nn.Linear(height, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class BackwardProducts(TorchDispatchMode):
    """Counts matrix products by the shape of what they give.

    All layers have biases, so those of the forward are ``addmm`` and the rest is the backward's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes[tuple(result.shape)] += 1
        return result


# Frozen tensors of 7, 4, 4 and 8; then, of each microbatch's backward by hand: the stages whose
# ``up`` and whose ``down`` get a weight gradient, those whose ``down`` hands a gradient on to what
# is before it, and how many products give a gradient of a stage's width: the head's, and that of
# each ``up`` with something live before it.
PRODUCTS = {
    3: ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), 4),  # up of stage 0 is the first live one
    5: ((1, 2, 3), (0, 1, 2, 3), (1, 2, 3), 4),  # down of stage 0
    7: ((1, 2, 3), (1, 2, 3), (1, 2, 3), 3),  # the front ends with stage 0
    9: ((2, 3), (1, 2, 3), (2, 3), 3),  # down of stage 1
    11: ((2, 3), (2, 3), (2, 3), 2),  # the front ends with stage 1
    13: ((3,), (2, 3), (3,), 2),  # down of stage 2
    15: ((3,), (3,), (3,), 1),  # the front ends with stage 2
    19: ((), (), (), 1),  # the norm of the head
    21: ((), (), (), 0),  # the head's matrix alone
    23: ((), (), (), 0),  # nothing is live
}


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_nothing_is_computed_in_front_of_the_first_live_tensor(schedule: type) -> None:
    first, *inner, last = (Tall(height) for height in TALL)
    modules = [nn.Sequential(Embedding(), first), *inner, nn.Sequential(last, Head())]
    pipeline = Pipeline(modules, schedule)
    pipeline.run()  # torch's shape inference also computes gradients, once
    for n_frozen, (ups, downs, chain, n_hidden) in PRODUCTS.items():
        masks = freeze_front(modules, n_frozen)
        with BackwardProducts() as products:
            run_cut(pipeline, masks)
        wanted = Counter(
            [(TALL[stage], WIDTH) for stage in ups]
            + [(WIDTH, TALL[stage]) for stage in downs]
            + [(ROWS, TALL[stage]) for stage in chain]
            + [(ROWS, WIDTH)] * n_hidden
            + [(VOCABULARY, WIDTH)] * (n_frozen < 23)
        )
        assert products.shapes == {shape: n * N_MICROBATCHES for shape, n in wanted.items()}
        with BackwardProducts() as uncut:
            pipeline.run(masks)
        saved = uncut.shapes.total() - products.shapes.total()
        # In the first stage the masks alone see to it.
        assert (saved > 0) == (n_frozen >= 7)
        assert not products.shapes - uncut.shapes


class Packed(nn.Module):
    """Counts what its forward puts aside for a backward, and notes what it gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.n_kept = 0
        self.has_graph: list[bool] = []

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            result = self.inner(hidden)
        self.has_graph.append(result.grad_fn is not None)
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        self.n_kept += 1
        return tensor


@pytest.mark.parametrize(("n_frozen", "n_idle"), [(4, 0), (9, 1), (12, 1), (15, 2), (31, 4)])
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_a_stage_that_is_frozen_whole_keeps_no_activations(
    schedule: type, n_frozen: int, n_idle: int
) -> None:
    modules = [Packed(module) for module in make_modules()]
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    plain = pipeline.run(masks)
    assert all(module.n_kept > 0 for module in modules)
    for module in modules:
        module.n_kept, module.has_graph = 0, []
        module.zero_grad()
    ran = run_cut(pipeline, masks)
    is_idle = [stage < n_idle for stage in range(4)]
    assert [module.n_kept == 0 for module in modules] == is_idle
    assert [module.has_graph for module in modules] == [[not idle] * 4 for idle in is_idle]
    # Neither the order of actions nor what stages hand on has changed.
    assert ran.executed == plain.executed
    assert all(map(torch.equal, ran.losses, plain.losses))
    assert ran.sent.keys() == plain.sent.keys()
    assert all(not ran.sent[stage, m].any() for stage in range(1, n_idle) for m in range(4))
