"""Stages under real torch schedules, all on one rank, against a plain chain of the same modules."""

import copy
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    WIDTH,
    Block,
    Checkpointed,
    Pipeline,
    assert_equal,
    by_schedule,
    expected,
    make_batch,
    make_modules,
    modules_for,
    random_masks,
    sum_loss,
    uniform_masks,
)
from tests.timelyfreeze.runtime.test_masked_backward import MatrixProducts
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.schedule.order import ActionKind

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("schedule", EVERY)
@given(seed=st.integers(0, 10**6), ratio=st.sampled_from([0.1, 0.5, 0.9]))
@by_schedule
def test_gradients_are_the_unmasked_ones_times_the_mask(
    schedule: type, seed: int, ratio: float
) -> None:
    modules = modules_for(schedule, seed % 7)
    masks = random_masks(modules, seed, ratio)
    ran = Pipeline(modules, schedule).run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))


@pytest.mark.parametrize("schedule", EVERY)
def test_a_mask_that_freezes_nothing_changes_nothing(schedule: type) -> None:
    modules = modules_for(schedule)
    ran = Pipeline(modules, schedule).run(uniform_masks(modules, False))
    assert_equal(ran, expected(modules, ran.executed))
    assert all(g is not None for stage in ran.gradients for g in stage)


@pytest.mark.parametrize("schedule", EVERY)
def test_with_everything_frozen_stages_still_send_exact_gradients(schedule: type) -> None:
    modules = modules_for(schedule)
    masks = uniform_masks(modules, True)
    ran = Pipeline(modules, schedule).run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))
    assert all(g is None for stage in ran.gradients for g in stage)
    assert len(ran.sent) == (len(modules) - 1) * N_MICROBATCHES


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_freezing_one_stage_leaves_the_others_alone(schedule: type, stage: int) -> None:
    modules = make_modules()
    masks = {stage: uniform_masks(modules, True)[stage]}
    ran = Pipeline(modules, schedule).run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))
    assert {g is None for g in ran.gradients[stage]} == {True}


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_a_tied_weight_has_one_place_in_the_mask(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule)
    names = pipeline.stages[1].parameter_names
    assert "up.weight" in names
    assert "tied.weight" not in names
    mask = np.array([name == "up.weight" for name in names])
    masks = {1: {0: mask, 2: mask}}
    ran = pipeline.run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_masks_hold_for_one_batch_and_gradients_add_over_passes(schedule: type) -> None:
    modules = make_modules()
    masks = random_masks(modules, 5, 0.5)
    pipeline = Pipeline(modules, schedule)
    pipeline.run(masks)
    after_masked = [[None if p.grad is None else p.grad.clone() for p in m.parameters()]
                    for m in modules]  # fmt: skip
    ran = pipeline.run()
    # A second pass without masks adds a full gradient to what the first has left.
    for module in modules:
        module.zero_grad()
    alone = pipeline.run()
    assert_equal(alone, expected(modules, alone.executed))
    for first, both, second in zip(after_masked, ran.gradients, alone.gradients, strict=True):
        for a, b, c in zip(first, both, second, strict=True):
            torch.testing.assert_close(b, c if a is None else a + c)


def test_without_attaching_it_is_its_base_class() -> None:
    modules = make_modules()
    gradients = []
    for stage_class in (FreezingStage, PipelineStage):
        own = copy.deepcopy(modules)
        stages = [stage_class(m, i, len(own), torch.device("cpu")) for i, m in enumerate(own)]
        schedule = FULL(stages, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False)
        tokens, labels = make_batch()
        schedule.step(tokens, target=labels)
        gradients.append([p.grad for m in own for p in m.parameters()])
    assert all(map(torch.equal, *gradients))


class Tall(nn.Module):
    """Its matrices have shapes that no other product in its backward has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 31)
        self.down = nn.Linear(31, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_no_product_is_computed_for_a_frozen_weight(schedule: type, place: int) -> None:
    modules = make_modules()
    if place == 0:
        modules[0] = nn.Sequential(modules[0], Tall())
    else:
        modules[place] = nn.Sequential(Tall(), modules[place])
    pipeline = Pipeline(modules, schedule)
    names = pipeline.stages[place].parameter_names
    up = np.array([name.endswith("up.weight") for name in names])
    up &= pipeline.stages[place].parameter_sizes == 31 * WIDTH
    both = pipeline.stages[place].parameter_sizes == 31 * WIDTH
    assert (up.sum(), both.sum()) == (1, 2)
    pipeline.run()  # torch's shape inference also computes gradients, once
    with MatrixProducts() as products:
        pipeline.run({place: {0: up, 1: both, 2: up}})
    assert products.shapes[31, WIDTH] == N_MICROBATCHES - 3
    assert products.shapes[WIDTH, 31] == N_MICROBATCHES - 1


def adam_state(optimizer: torch.optim.AdamW, parameter: Tensor) -> list[Tensor]:
    state = optimizer.state[parameter]
    return [parameter.detach().clone(), *(state[k].clone() for k in sorted(state))]


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("foreach", [True, False])
def test_adamw_leaves_a_tensor_alone_that_no_microbatch_updates(
    schedule: type, foreach: bool
) -> None:
    modules = make_modules()
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, foreach=foreach)
    pipeline = Pipeline(modules, schedule)
    pipeline.run()
    optimizer.step()
    optimizer.zero_grad()
    before = [adam_state(optimizer, p) for p in parameters]
    masks = uniform_masks(modules, False)
    for stage in masks:
        for microbatch, mask in masks[stage].items():
            mask[::3] = True  # in all microbatches
            mask[1::3] = microbatch > 0  # in all but one
    pipeline.run(masks)
    optimizer.step()
    after = [adam_state(optimizer, p) for p in parameters]
    always = np.concatenate([np.arange(len(masks[s][0])) % 3 == 0 for s in masks])
    assert 0 < always.sum() < len(always)
    for old, new, is_frozen in zip(before, after, always, strict=True):
        assert {torch.equal(a, b) for a, b in zip(old, new, strict=True)} == {bool(is_frozen)}
    assert all(p.requires_grad for p in parameters)


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_per_tensor_runs_down_to_the_embedding_in_every_microbatch(
    schedule: type, ratio: float
) -> None:
    modules = make_modules()
    reached: Counter[str] = Counter()
    embedding = modules[0][0].embedding
    pipeline = Pipeline(modules, schedule, per_tensor=True)

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: reached.update(["embedding"]))

    embedding.register_forward_hook(watch)
    pipeline.run()
    for module in modules:
        module.zero_grad()
    reached.clear()
    masks = random_masks(modules, 1, ratio)
    for mask in masks[0].values():
        mask[:3] = True  # the embedding and the layer next to it: nothing live asks for the chain
    ran = pipeline.run(masks)
    assert reached["embedding"] == N_MICROBATCHES
    del modules[0][0].embedding._forward_hooks  # so that the oracle can copy the modules
    modules[0][0].embedding._forward_hooks = {}
    assert_equal(ran, expected(modules, ran.executed, masks))


def test_per_tensor_needs_an_embedding_in_the_first_stage_only() -> None:
    stage = FreezingStage(Block(), 0, 2, torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=r'first_stage is "per_tensor", which needs an nn.Embedding, or a module '
        r'tok_embeddings, in the first stage, and Block has none there; set it to "all_or_nothing"',
    ):
        stage.attach(None, per_tensor=True)
    FreezingStage(Block(), 1, 2, torch.device("cpu")).attach(None, per_tensor=True)


@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_evaluation_runs_without_masks_and_clocks(schedule: type, per_tensor: bool) -> None:
    modules = modules_for(schedule)
    wanted = expected(modules, [])
    before = copy.deepcopy(modules)
    pipeline = Pipeline(modules, schedule, per_tensor=per_tensor)
    masks = random_masks(modules, 2, 0.5)
    tokens, labels = make_batch()
    pipeline.stages[0].freeze(masks[0])
    embedded: list[weakref.ref[Tensor]] = []
    hook = modules[0][0][0].embedding.register_forward_hook(
        lambda module, inputs, output: embedded.append(weakref.ref(output))
    )
    losses: list[Tensor] = []
    with torch.no_grad(), pipeline.recorder.recorded_batch():
        pipeline.schedule.eval(tokens, target=labels, losses=losses)
    assert all(map(torch.equal, losses, wanted.losses))
    assert pipeline.recorder.drain() == []
    assert pipeline.stages[0].applied_ratios == {}
    hook.remove()
    assert len(embedded) >= N_MICROBATCHES
    assert all(each() is None for each in embedded), "evaluation must not hold on to activations"
    # Training goes on as if nothing had been.
    ran = pipeline.run(masks)
    assert_equal(ran, expected(before, ran.executed, masks))


class Bfloat16(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(hidden)


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_under_autocast_gradients_are_exact_too(schedule: type, ratio: float) -> None:
    modules: list[nn.Module] = [Bfloat16(module) for module in make_modules()]
    masks = random_masks(modules, 3, ratio)
    ran = Pipeline(modules, schedule).run(masks)
    wanted = expected(modules, ran.executed, masks)
    assert_equal(ran, wanted)
    in_full = expected([module.inner for module in modules], ran.executed, masks)
    assert not torch.equal(ran.losses[0], in_full.losses[0]), "autocast must have had an effect"


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_with_activation_checkpointing_a_full_backward_is_exact(ratio: float) -> None:
    modules = make_modules()
    modules[1:3] = [Checkpointed(module) for module in modules[1:3]]
    masks = random_masks(modules, 4, ratio)
    ran = Pipeline(modules, FULL).run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))


@pytest.mark.parametrize("schedule", EVERY)
def test_applied_shares_are_shares_of_elements(schedule: type) -> None:
    modules = modules_for(schedule)
    pipeline = Pipeline(modules, schedule)
    masks = random_masks(modules, 6, 0.5)
    for stage in masks:
        del masks[stage][1]
    pipeline.run(masks)
    for stage, module in zip(pipeline.stages, modules, strict=True):
        sizes = np.array([p.numel() for p in module.parameters()])
        own = masks[stage.stage_index]
        wanted = {m: sizes[own[m]].sum() / sizes.sum() if m in own else 0.0 for m in range(4)}
        assert stage.applied_ratios == pytest.approx(wanted)
        stage.freeze({})
        assert stage.applied_ratios == {}


@pytest.mark.parametrize("schedule", EVERY)
def test_every_action_of_a_pass_is_recorded_once(schedule: type) -> None:
    modules = modules_for(schedule)
    ran = Pipeline(modules, schedule).run()
    assert len(set(ran.executed)) == len(ran.executed)
    kinds = Counter((a.stage, a.kind) for a in ran.executed)
    for stage in range(len(modules)):
        n_full = kinds[stage, ActionKind.FULL_BACKWARD]
        assert kinds[stage, ActionKind.FORWARD] == N_MICROBATCHES
        assert kinds[stage, ActionKind.INPUT_BACKWARD] == N_MICROBATCHES - n_full
        assert kinds[stage, ActionKind.WEIGHT_BACKWARD] == N_MICROBATCHES - n_full
