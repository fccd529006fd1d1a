"""Stages behind a frozen front: the chain of input gradients ends where nothing needs it.

Most cases freeze the first tensors of the model, in the order of its parameters. Each stage is told
in which microbatches nothing in front is live. The oracle is the plain chain of the same modules.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils._python_dispatch import TorchDispatchMode

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SPLIT,
    VOCABULARY,
    WIDTH,
    Checkpointed,
    Embedding,
    Head,
    Masks,
    Pipeline,
    Ran,
    assert_equal,
    expected,
    make_batch,
    make_modules,
    modules_for,
    random_masks,
    shard,
    uniform_masks,
    whole,
)

LOOPED = torch_schedules.ScheduleLoopedBFS
V_SHAPED = [torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV]
SINGLE = [torch_schedules.ScheduleGPipe, torch_schedules.Schedule1F1B]
EVERY = [FULL, SPLIT, LOOPED, *V_SHAPED, *SINGLE]
# Numbers of frozen tensors. The four stages of ``make_modules`` have 9, 6, 6 and 10; where there
# are two stages, they have 15 and 16.
FRONTS = {
    "in the first stage": 4,
    "the first stage": 9,
    "into the second stage": 12,
    "two stages": 15,
    "into the third stage": 19,
    "all but the last stage": 21,
    "into the last stage": 26,
    "all but one tensor": 30,
    "everything": 31,
}


pytestmark = pytest.mark.usefixtures("one_rank")


def freeze_front(modules: Sequence[nn.Module], n_frozen: int) -> dict[int, dict[int, np.ndarray]]:
    """Freeze the first tensors of the model in every microbatch."""
    masks = uniform_masks(modules, False)
    before = 0
    for stage in masks:
        for mask in masks[stage].values():
            mask[: max(0, n_frozen - before)] = True
        before += len(list(modules[stage].parameters()))
    return masks


def cut(masks: Masks) -> list[set[int]]:
    """For each stage, the microbatches in which every stage in front is frozen whole."""
    return [
        {m for m in range(N_MICROBATCHES) if all(masks[front][m].all() for front in range(stage))}
        for stage in masks
    ]


def run_cut(pipeline: Pipeline, masks: Masks, **options: Any) -> Ran:
    return pipeline.run(masks, cut=cut(masks), **options)


def expected_cut(modules: Sequence[nn.Module], ran: Ran, masks: Masks) -> Ran:
    """Gradients of the plain chain times the masks; zeros arrive where nobody needs any."""
    wanted = expected(modules, ran.executed, masks)
    unneeded = cut(masks)
    for (stage, microbatch), gradient in wanted.sent.items():
        if microbatch in unneeded[stage]:
            wanted.sent[stage, microbatch] = torch.zeros_like(gradient)
    return wanted


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_frozen", FRONTS.values(), ids=FRONTS.keys())
@pytest.mark.parametrize("schedule", EVERY)
def test_live_gradients_are_exact_behind_a_frozen_front(schedule: type, n_frozen: int) -> None:
    modules = modules_for(schedule)
    masks = freeze_front(modules, n_frozen)
    ran = run_cut(Pipeline(modules, schedule), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))
    gradients = [gradient for stage in ran.gradients for gradient in stage]
    assert [g is None for g in gradients] == [i < n_frozen for i in range(len(gradients))]
    assert len(ran.sent) == (len(modules) - 1) * N_MICROBATCHES


@pytest.mark.parametrize("schedule", [FULL, SPLIT, *V_SHAPED])
@given(
    seed=st.integers(0, 10**6), n_frozen=st.integers(0, 31), ratio=st.sampled_from([0.0, 0.5, 0.9])
)
@settings(deadline=None, max_examples=8)
def test_live_gradients_are_exact_with_more_frozen_behind_the_front(
    schedule: type, seed: int, n_frozen: int, ratio: float
) -> None:
    modules = modules_for(schedule, seed % 7)
    masks = freeze_front(modules, n_frozen)
    scattered = random_masks(modules, seed, ratio)
    for stage in masks:
        for microbatch in masks[stage]:
            masks[stage][microbatch] |= scattered[stage][microbatch]
    ran = run_cut(Pipeline(modules, schedule), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.parametrize("schedule", EVERY)
@given(
    seed=st.integers(0, 10**6),
    depths=st.lists(st.integers(0, 4), min_size=N_MICROBATCHES, max_size=N_MICROBATCHES),
    ratio=st.sampled_from([0.0, 0.5]),
)
@settings(deadline=None, max_examples=8)
def test_live_gradients_are_exact_behind_fronts_of_different_depth(
    schedule: type, seed: int, depths: list[int], ratio: float
) -> None:
    modules = modules_for(schedule, seed % 7)
    masks = random_masks(modules, seed, ratio)
    for microbatch, depth in enumerate(depths):
        for stage in range(min(depth, len(modules))):
            masks[stage][microbatch][:] = True
    ran = run_cut(Pipeline(modules, schedule), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.parametrize("n_frozen", [4, 12, 15, 26])
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_gradients_add_over_passes(schedule: type, n_frozen: int) -> None:
    modules = make_modules()
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    first = run_cut(pipeline, masks)
    both = run_cut(pipeline, masks)
    both.executed = first.executed + both.executed
    assert_equal(both, expected_cut(modules, both, masks))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_gradients_stay_that_were_there_before_their_tensors_froze(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule)
    wanted: list[Any] = [0.0] * 31
    for n_frozen in (0, 9, 12, 19):
        masks = freeze_front(modules, n_frozen)
        ran = run_cut(pipeline, masks)
        alone = [g for stage in expected(modules, ran.executed, masks).gradients for g in stage]
        wanted = [a if b is None else a + b for a, b in zip(wanted, alone, strict=True)]
    for got, want in zip([g for stage in ran.gradients for g in stage], wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n_frozen", [4, 12, 15, 19])
def test_with_activation_checkpointing_live_gradients_are_exact(n_frozen: int) -> None:
    modules = make_modules()
    modules[1:3] = [Checkpointed(module) for module in modules[1:3]]
    masks = freeze_front(modules, n_frozen)
    ran = run_cut(Pipeline(modules, FULL), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"), [(FULL, False), (FULL, True), (SPLIT, False)]
)
@pytest.mark.parametrize("n_frozen", [12, 15, 31])
def test_under_fsdp_live_gradients_are_exact(
    schedule: type, reshard_after_forward: bool, n_frozen: int
) -> None:
    modules = make_modules()
    plain = copy.deepcopy(modules)
    shard(modules, reshard_after_forward=reshard_after_forward)
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    for each in (masks, uniform_masks(modules, False)):  # frozen from the first pass on, then live
        ran = run_cut(pipeline, each)
        ran.gradients = whole([[p.grad for p in module.parameters()] for module in modules])
        assert_equal(ran, expected_cut(plain, ran, each))
        for module in modules:
            module.zero_grad()


@pytest.mark.parametrize("n_frozen", [12, 15, 31])
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_torch_finds_in_order_what_stages_hand_to_each_other(schedule: type, n_frozen: int) -> None:
    """At this level torch compares every tensor between stages with what was agreed at first."""
    modules = make_modules()
    masks = freeze_front(modules, n_frozen)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        ran = run_cut(Pipeline(modules, schedule), masks)
    finally:
        dist.set_debug_level(level)
    assert_equal(ran, expected_cut(modules, ran, masks))


# -- work and memory -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("n_frozen", PRODUCTS)
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_nothing_is_computed_in_front_of_the_first_live_tensor(
    schedule: type, n_frozen: int
) -> None:
    first, *inner, last = (Tall(height) for height in TALL)
    modules = [nn.Sequential(Embedding(), first), *inner, nn.Sequential(last, Head())]
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    pipeline.run()  # torch's shape inference also computes gradients, once
    with BackwardProducts() as products:
        run_cut(pipeline, masks)
    ups, downs, chain, n_hidden = PRODUCTS[n_frozen]
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


@pytest.mark.parametrize("n_frozen", [4, 12, 15, 31])
@pytest.mark.parametrize("schedule", EVERY)
def test_applied_shares_are_those_of_the_masks(schedule: type, n_frozen: int) -> None:
    modules = modules_for(schedule)
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    run_cut(pipeline, masks)
    before = 0
    for stage, module in zip(pipeline.stages, modules, strict=True):
        sizes = [p.numel() for p in module.parameters()]
        fraction = sum(sizes[: max(0, n_frozen - before)]) / sum(sizes)
        assert stage.applied_ratios == pytest.approx(dict.fromkeys(range(N_MICROBATCHES), fraction))
        before += len(sizes)


# -- afterwards ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("n_frozen", [12, 15, 31])
@pytest.mark.parametrize("schedule", EVERY)
def test_passes_with_and_without_a_front_leave_no_trace_in_each_other(
    schedule: type, n_frozen: int
) -> None:
    modules = modules_for(schedule)
    pipeline = Pipeline(modules, schedule)
    front, scattered = freeze_front(modules, n_frozen), random_masks(modules, 8, 0.3)
    nothing = uniform_masks(modules, False)
    for masks in (nothing, front, scattered, front):
        ran = run_cut(pipeline, masks)
        assert_equal(ran, expected_cut(modules, ran, masks))
        for module in modules:
            module.zero_grad()
    ran = pipeline.run()
    assert_equal(ran, expected(modules, ran.executed))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_a_pass_that_nobody_announces_freezes_nothing(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule)
    ran = run_cut(pipeline, freeze_front(modules, 31))
    tokens, labels = make_batch()
    pipeline.schedule.step(tokens, target=labels)
    ran.gradients = [[p.grad for p in module.parameters()] for module in modules]
    wanted = expected(modules, ran.executed).gradients
    assert all(all(map(torch.equal, *pair)) for pair in zip(ran.gradients, wanted, strict=True))


@pytest.mark.parametrize("n_frozen", [12, 31])
@pytest.mark.parametrize("schedule", SINGLE)  # torch evaluates no neighbours of one rank
def test_evaluation_is_as_always(schedule: type, n_frozen: int) -> None:
    modules = modules_for(schedule)
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    run_cut(pipeline, masks)
    for module in modules:
        module.zero_grad()
    (stage,) = pipeline.stages
    stage.freeze(masks[0], without_input_grads=range(N_MICROBATCHES))
    tokens, labels = make_batch()
    losses: list[Tensor] = []
    with torch.no_grad():
        pipeline.schedule.eval(tokens, target=labels, losses=losses)
    assert all(map(torch.equal, losses, expected(modules, []).losses))
    assert stage.applied_ratios == {}
    ran = pipeline.run()
    assert_equal(ran, expected(modules, ran.executed))
