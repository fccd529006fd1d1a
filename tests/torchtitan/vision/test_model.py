"""The model that is cut into stages is the library's, to the last bit."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B

from tests.timelyfreeze.helpers.stages import N_MICROBATCHES, Pipeline, process_group
from tests.torchtitan.helpers.image_models import (
    CLASSES,
    KINDS,
    N_LAYERS,
    args_of,
    library_model,
    some_pictures,
)
from torchtitan.vision.model import VisionModel

pytest.importorskip("transformers")
# Where ConvNeXt's stages end, in the middle of one, and behind the first block of one.
CUTS = [(2,), (3, 5), (1, 2, 3, 4, 5, 6, 7), (6,)]


def stage_of(model: VisionModel, begin: int, end: int) -> VisionModel:
    """Keep some blocks, and the ends of the model with them, as upstream does."""
    part = copy.deepcopy(model)
    for name in list(part.layers):
        if not begin <= int(name) < end:
            del part.layers[name]
    if begin > 0:
        part.tok_embeddings = None
    if end < N_LAYERS:
        part.norm = part.output = None
    return part


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_library(kind: str) -> None:
    library = library_model(kind)
    model = VisionModel(args_of(kind), library).eval()
    pictures = some_pictures(3)
    with torch.no_grad():
        expected = library(pictures).logits
        found = model(pictures)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_the_other_are_the_model(kind: str, cut: tuple[int, ...]) -> None:
    model = VisionModel(args_of(kind), library_model(kind)).eval()
    places = [0, *cut, N_LAYERS]
    hidden = some_pictures(3)
    with torch.no_grad():
        expected = model(hidden)
        for begin, end in pairwise(places):
            hidden = stage_of(model, begin, end)(hidden)
            assert hidden.is_contiguous()
    torch.testing.assert_close(hidden, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_hands_back_a_contiguous_gradient(kind: str) -> None:
    model = VisionModel(args_of(kind), library_model(kind)).eval()
    with torch.no_grad():
        hidden = stage_of(model, 0, 3)(some_pictures(3))
    hidden.requires_grad_()
    for part in (stage_of(model, 3, 6), stage_of(model, 3, N_LAYERS)):
        output = part(hidden)
        (gradient,) = torch.autograd.grad(output, hidden, torch.randn_like(output))
        assert gradient.is_contiguous()
        assert gradient.shape == hidden.shape


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_drawn_by_the_librarys_rule(kind: str) -> None:
    with torch.device("meta"):
        model = VisionModel(args_of(kind))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if "grn" in name or name.endswith("bias"):
            assert not values.any(), name
        elif "norm" in name or "downsampling.0" in name:
            assert (values == 1.0).all(), name
        else:
            assert 0.01 < values.std() < 0.03, name


def test_blocks_of_convnext_are_numbered_over_all_stages() -> None:
    """A stage's downsampling is the first block's; a role has one name but for the number."""
    names = {name for name, _ in VisionModel(args_of("convnextv2")).named_parameters()}
    with_downsampling = {n.split(".")[1] for n in names if "downsampling" in n}
    assert with_downsampling == {"2", "6"}
    for number in range(N_LAYERS):
        assert f"layers.{number}.block.dwconv.weight" in names
    assert {name.split(".")[0] for name in names} == {"tok_embeddings", "layers", "norm", "output"}


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_runs_down_to_the_patches_only_by_tensor(kind: str, per_tensor: bool) -> None:
    torch.manual_seed(1)
    model = VisionModel(args_of(kind))
    model.init_weights()
    reached: list[Tensor] = []

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(reached.append)

    model.tok_embeddings.register_forward_hook(watch)
    live = {"norm.weight", "norm.bias", "output.weight", "output.bias"}
    mask = np.array([name not in live for name, _ in model.named_parameters()])
    assert len(live) == np.count_nonzero(~mask)
    batch = some_pictures(2 * N_MICROBATCHES), torch.arange(2 * N_MICROBATCHES) % CLASSES
    with process_group():
        pipeline = Pipeline([model], Schedule1F1B, per_tensor=per_tensor, loss_fn=summed)
        ran = pipeline.run({0: dict.fromkeys(range(N_MICROBATCHES), mask)}, batch)
    assert len(reached) == (N_MICROBATCHES if per_tensor else 0)
    assert [gradient is None for gradient in ran.gradients[0]] == mask.tolist()
