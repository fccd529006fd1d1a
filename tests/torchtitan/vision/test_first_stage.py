"""A first stage that is frozen by tensor, as in the paper, where patches are embedded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B

from tests.timelyfreeze.helpers.stages import N_MICROBATCHES, Pipeline, process_group
from tests.torchtitan.helpers.image_models import CLASSES, KINDS, args_of, some_pictures
from torchtitan.vision.model import VisionModel

pytest.importorskip("transformers")


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
