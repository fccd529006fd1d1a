"""What keeps a front from being cut off, or from putting out the same again."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.timelyfreeze.helpers.layered import Layer, Part
from tests.timelyfreeze.helpers.stages import FULL, Pipeline, process_group
from timelyfreeze.front.caching import check_blocks
from timelyfreeze.policies import build_layout


def check(change: Callable[[Part], None]) -> None:
    torch.manual_seed(0)
    parts = [Part(range(0, 2), is_last=False), Part(range(2, 4), is_last=True)]
    change(parts[1])
    with process_group():
        stages = Pipeline(parts, FULL).stages
    for stage in stages:
        stage.find_blocks("layers", "embedding")
    layout = build_layout(
        {
            stage.stage_index: [(name, p.numel()) for name, p in stage.named_stage_parameters()]
            for stage in stages
        }
    )
    check_blocks(stages, layout)


def replace_head(part: Part) -> None:
    part.head = nn.ModuleDict({"7": nn.Linear(5, 13)})  # type: ignore[assignment]


def add_block_without_parameters(part: Part) -> None:
    part.layers["4"] = nn.Tanh()


def add_dropout(part: Part) -> None:
    layer = part.layers["3"]
    assert isinstance(layer, Layer)
    layer.drop = nn.Dropout(0.1)


def add_idle_dropout(part: Part) -> None:
    part.layers["3"].drop = nn.Dropout(0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_head, "stage 1 has 2 blocks, and names of its parameters have 3 different"),
        (add_block_without_parameters, "stage 1 has 3 blocks, .* have 2 different numbers"),
        (add_dropout, r"layers\.3\.drop of stage 1 is Dropout with p = 0\.1; .* set p to 0\.0"),
    ],
)
def test_what_cannot_be_cut_or_does_not_come_again_is_refused(
    change: Callable[[Part], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(change)


def test_blocks_that_are_numbered_are_fine() -> None:
    check(lambda part: None)
    check(add_idle_dropout)
