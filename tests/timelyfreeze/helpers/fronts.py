"""Frozen fronts of a model: the first tensors, in the order of its parameters.

Each stage is told in which microbatches nothing in front is live.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.timelyfreeze.helpers.stages import (
    N_MICROBATCHES,
    Masks,
    Pipeline,
    Ran,
    expected,
    uniform_masks,
)


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
