"""Stages that sample tokens under real schedules, against a plain chain that samples alike."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SPLIT,
    Checkpointed,
    Pipeline,
    Samples,
    assert_equal,
    expected,
    make_modules,
    modules_for,
    shard,
    whole,
)
from timelyfreeze.runtime.sampling import TokenSample, TokenSampler

pytestmark = pytest.mark.usefixtures("one_rank")


def samples_for(modules: list[nn.Module], ratio: float, input_ratio: float) -> Samples:
    """Random numbers for every stage and microbatch but the second, which stays exact."""
    rng = np.random.default_rng(5)
    return {
        stage: {
            m: TokenSample(
                ratio, input_ratio, rng.random((TokenSampler(copy.deepcopy(module)).n_layers, 2))
            )
            for m in range(N_MICROBATCHES)
            if m != 1
        }
        for stage, module in enumerate(modules)
    }


def assert_close(ran, wanted) -> None:  # type: ignore[no-untyped-def]
    assert ran.sent.keys() == wanted.sent.keys()
    torch.testing.assert_close(list(ran.sent.values()), [wanted.sent[key] for key in ran.sent])
    torch.testing.assert_close(ran.gradients, wanted.gradients)


@pytest.mark.parametrize("input_ratio", [0.0, 0.4])
@pytest.mark.parametrize("schedule", EVERY)
def test_gradients_are_those_of_a_chain_that_samples_the_same_tokens(
    schedule: type, input_ratio: float
) -> None:
    modules = modules_for(schedule)
    samples = samples_for(modules, 0.5, input_ratio)
    wanted_modules = copy.deepcopy(modules)
    ran = Pipeline(modules, schedule, samples_tokens=True).run(samples=samples)
    assert_close(ran, expected(wanted_modules, ran.executed, samples=samples))
    exact = expected(wanted_modules, ran.executed)
    assert not torch.equal(ran.gradients[0][1], exact.gradients[0][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", EVERY)
def test_without_samples_nothing_changes_to_the_bit(schedule: type) -> None:
    modules = modules_for(schedule)
    wanted_modules = copy.deepcopy(modules)
    ran = Pipeline(modules, schedule, samples_tokens=True).run()
    assert_equal(ran, expected(wanted_modules, ran.executed))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_applied_ratios_are_those_of_the_samples(schedule: type) -> None:
    modules = modules_for(schedule)
    pipeline = Pipeline(modules, schedule, samples_tokens=True)
    pipeline.run(samples=samples_for(modules, 0.5, 0.0))
    assert [stage.applied_ratios for stage in pipeline.stages] == [
        {0: 0.5, 1: 0.0, 2: 0.5, 3: 0.5}
    ] * 4


@pytest.mark.parametrize("schedule", [FULL])
def test_activations_that_are_computed_again_are_sampled_alike(schedule: type) -> None:
    modules = make_modules()
    samples = samples_for(modules, 0.5, 0.25)
    wanted_modules = copy.deepcopy(modules)
    modules[1], modules[2] = Checkpointed(modules[1]), Checkpointed(modules[2])
    ran = Pipeline(modules, schedule, samples_tokens=True).run(samples=samples)
    assert_close(ran, expected(wanted_modules, ran.executed, samples=samples))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"), [(FULL, False), (FULL, True), (SPLIT, False)]
)
def test_under_fsdp_gradients_are_those_of_a_chain_that_samples_the_same_tokens(
    schedule: type, reshard_after_forward: bool
) -> None:
    modules = make_modules()
    samples = samples_for(modules, 0.5, 0.25)
    wanted_modules = copy.deepcopy(modules)
    shard(modules, reshard_after_forward=reshard_after_forward)
    ran = Pipeline(modules, schedule, samples_tokens=True).run(samples=samples)
    ran.gradients = whole([[p.grad for p in module.parameters()] for module in modules])
    assert_close(ran, expected(wanted_modules, ran.executed, samples=samples))
