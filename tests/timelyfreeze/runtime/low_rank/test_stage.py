"""Stages whose frozen weights learn in a subspace, under real schedules, against a plain chain."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SPLIT,
    WIDTH,
    Checkpointed,
    Masks,
    Pipeline,
    Ran,
    assert_equal,
    expected,
    make_modules,
    modules_for,
    random_masks,
    uniform_masks,
)
from tests.timelyfreeze.runtime.test_masked_backward import MatrixProducts
from timelyfreeze.runtime import FreezingStage

pytestmark = pytest.mark.usefixtures("one_rank")


def linear_weights(module: nn.Module) -> list[bool]:
    """Whether each parameter is the weight of a linear layer."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    return [id(p) in weights for p in module.parameters()]


def covered(modules: list[nn.Module], masks: Masks) -> Masks:
    return {
        stage: {m: mask & linear_weights(modules[stage]) for m, mask in of_stage.items()}
        for stage, of_stage in masks.items()
    }


def projected(gradient: Tensor, name: str, stage: FreezingStage) -> Tensor:
    """The part of a gradient that lies in a subspace of its group, by the definition."""
    (group,) = (group for group in stage.low_rank.groups if name in group.names)
    basis = stage.low_rank.bases[group.names[0]]
    projection = basis @ basis.t()
    d_out, d_in = gradient.shape
    is_of_inputs = d_in <= d_out or len(group.names) > 1
    return gradient @ projection if is_of_inputs else projection @ gradient


def wanted_gradients(modules: list[nn.Module], ran: Ran, masks: Masks, stages: list) -> list:  # type: ignore[type-arg]
    """Exact gradients of live microbatches, and the projected sum of the frozen ones."""
    live = expected(modules, ran.executed, masks).gradients
    opposite = {
        stage: {m: ~mask for m, mask in of_stage.items()} for stage, of_stage in masks.items()
    }
    frozen = expected(modules, ran.executed, opposite).gradients
    found = []
    for stage, of_live, of_frozen in zip(stages, live, frozen, strict=True):
        names = stage.parameter_names
        for name, exact, left in zip(names, of_live, of_frozen, strict=True):
            part = None if left is None else left
            if part is not None and name in stage.low_rank.weights:
                part = projected(part, name, stage)
            terms = [each for each in (exact, part) if each is not None]
            found.append(sum(terms))
    return found


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("schedule", EVERY)
def test_frozen_microbatches_give_the_part_that_lies_in_the_subspace(
    schedule: type, ratio: float
) -> None:
    modules = modules_for(schedule)
    masks = covered(modules, random_masks(modules, 3, ratio))
    pipeline = Pipeline(modules, schedule, gradient_rank=2)
    ran = pipeline.run(masks)
    wanted = wanted_gradients(modules, ran, masks, pipeline.stages)
    found = [gradient for of_stage in ran.gradients for gradient in of_stage]
    torch.testing.assert_close(found, wanted)
    sent = expected(modules, ran.executed).sent
    assert ran.sent.keys() == sent.keys()
    torch.testing.assert_close(ran.sent, sent)
    for stage in pipeline.stages:
        assert {b.shape for b in stage.low_rank.bases.values()} == {(WIDTH, 2)}


@pytest.mark.parametrize("schedule", EVERY)
def test_with_all_directions_nothing_is_lost(schedule: type) -> None:
    """The whole gradient lies in the space of as many directions as the shorter side has."""
    modules = modules_for(schedule)
    masks = covered(modules, uniform_masks(modules, True))
    ran = Pipeline(modules, schedule, gradient_rank=99).run(masks)
    torch.testing.assert_close(ran.gradients, expected(modules, ran.executed).gradients)


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_what_freezes_nothing_changes_no_bit(schedule: type) -> None:
    modules = modules_for(schedule)
    ran = Pipeline(modules, schedule, gradient_rank=2).run(uniform_masks(modules, False))
    assert_equal(ran, expected(modules, ran.executed))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_batches_add_up_and_leave_nothing_behind(schedule: type) -> None:
    modules = modules_for(schedule)
    masks = covered(modules, random_masks(modules, 5, 0.6))
    pipeline = Pipeline(modules, schedule, gradient_rank=3)
    once = copy.deepcopy(pipeline.run(masks).gradients)
    twice = pipeline.run(masks).gradients
    torch.testing.assert_close(twice, [[2 * g for g in of_stage] for of_stage in once])


def test_recomputed_blocks_learn_the_same() -> None:
    modules = make_modules()
    wrapped = [modules[0], *map(Checkpointed, modules[1:])]
    masks = covered(modules, random_masks(modules, 7, 0.5))
    plain = Pipeline(copy.deepcopy(modules), FULL, gradient_rank=2).run(masks)
    again = Pipeline(copy.deepcopy(wrapped), FULL, gradient_rank=2)
    # A block's names differ by its wrapper, and with them its first directions.
    same = Pipeline(modules, FULL, gradient_rank=2)
    for stage, other in zip(again.stages, same.stages, strict=True):
        bases = other.low_rank.bases.values()
        stage.low_rank.bases = dict(zip(stage.low_rank.bases, bases, strict=True))
    torch.testing.assert_close(again.run(masks).gradients, plain.gradients)


def test_a_frozen_weight_has_one_large_product_a_batch() -> None:
    modules = make_modules()
    layers = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    square = [layer.weight for layer in layers if layer.weight.shape == (WIDTH, WIDTH)]
    counts = {}
    for frozen in (False, True):
        masks = covered(modules, uniform_masks(modules, frozen))
        pipeline = Pipeline(copy.deepcopy(modules), FULL, gradient_rank=1)
        with MatrixProducts() as products:
            pipeline.run(masks)
        counts[frozen] = products.shapes[WIDTH, WIDTH]
    assert counts == {False: N_MICROBATCHES * len(square), True: len(set(square))}


def test_a_layer_whose_input_needs_no_gradient_stays_exact() -> None:
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    second = nn.Linear(WIDTH, 3)
    x, y = torch.randn(2 * N_MICROBATCHES, WIDTH), torch.randn(2 * N_MICROBATCHES, 3)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    pipeline = Pipeline([first, second], FULL, gradient_rank=2, loss_fn=loss_fn)
    masks = {0: {m: np.array([True, False] * 2) for m in range(N_MICROBATCHES)}}
    pipeline.run(masks, batch=(x, y))
    (expected_gradient,) = torch.autograd.grad(loss_fn(second(first(x)), y), first[0].weight)
    torch.testing.assert_close(first[0].weight.grad, expected_gradient)
