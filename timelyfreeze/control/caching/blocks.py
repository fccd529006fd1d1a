"""What a model must be like, so that its front can be cut off and puts out the same again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime import FreezingStage


def check_blocks(stages: Sequence[FreezingStage], layout: ModelLayout) -> None:
    """Check the stages of a rank.

    Args:
        stages: The stages.
        layout: The tensors of the model, by whose names its blocks are counted.

    Raises:
        ValueError: If a stage's module cannot begin at a block, has other blocks than its
            parameters tell, or has dropout.
    """
    for stage in stages:
        n_blocks = stage.blocks.n_blocks
        layers = layout.layers[layout.of_stage(stage.stage_index)]
        n_told = len(np.unique(layers[(layers >= 0) & (layers < layout.n_layers)]))
        if n_blocks != n_told:
            raise ValueError(
                f"stage {stage.stage_index} has {n_blocks} blocks, and names of its parameters "
                f"have {n_told} different numbers; the activation cache needs a number for each "
                "block, and no other"
            )
        for name, module in stage.submod.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0.0:
                raise ValueError(
                    f"{name} of stage {stage.stage_index} is Dropout with p = {module.p}; the "
                    "activation cache needs outputs that come again: set p to 0.0"
                )
