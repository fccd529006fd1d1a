"""The transformer blocks of a rank's stages, as modules with their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.settings import key


@dataclass(frozen=True)
class StageBlock:
    """A transformer block of this rank.

    Attributes:
        stage: Its stage.
        module: Wrapped or not.
        parameters: By name in the model, as the optimizer has them.
        prefix: What those names begin with.
    """

    stage: FreezingStage
    module: nn.Module
    parameters: dict[str, Tensor]
    prefix: str


def stage_blocks(layout: ModelLayout, stages: Sequence[FreezingStage]) -> dict[int, StageBlock]:
    """Return the blocks of a rank by layer: the modules whose name ends in the layer's number.

    Args:
        layout: The tensors of all stages.
        stages: This rank's, recorders attached.
    """
    layer_of = dict(zip(layout.names, layout.layers.tolist(), strict=True))
    blocks: dict[int, StageBlock] = {}
    for stage in stages:
        paths = [path for path, _ in stage.submod.named_parameters()]
        named = stage.named_stage_parameters()
        for path, (name, parameter) in zip(paths, named, strict=True):
            layer = layer_of[name]
            if not 0 <= layer < layout.n_layers:
                continue
            if layer not in blocks:
                module = stage.submod.get_submodule(_to_number(path))
                blocks[layer] = StageBlock(stage, module, {}, f"{_to_number(name)}.")
            blocks[layer].parameters[name] = parameter
    return blocks


def check_importable(blocks: Mapping[int, StageBlock]) -> None:
    """Refuse classes of the script that was started, which no other process can import.

    Raises:
        ValueError: Naming the class and the first block that has it.
    """
    for layer, block in blocks.items():
        for module in block.module.modules():
            if type(module).__module__ == "__main__":
                raise ValueError(
                    f"block {layer} has a {type(module).__name__}, whose class stands in the "
                    "script that was started; a process of its own could not import it, so put it "
                    f'into a module, or set {key("egeria.reference")} to "inline"'
                )


def _to_number(name: str) -> str:
    """Return a name up to its first number."""
    parts = name.split(".")
    return ".".join(parts[: 1 + next(i for i, part in enumerate(parts) if part.isdigit())])
