"""Stages whose linear layers compute in emulated float8; needs the package torchao."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.stages import (
    FULL,
    SPLIT,
    VOCABULARY,
    Pipeline,
    assert_equal,
    expected,
    random_masks,
)

WIDTH = 16  # float8 products need multiples of it


pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_the_unmasked_ones_times_the_mask(schedule: type, recipe: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block()),
        Block(),
        Block(),
        nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)),
    ]
    in_full = copy.deepcopy(modules)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)  # no recipe has it, and it is frozen
    for module in modules:
        float8.convert_to_float8_training(module, config=config)
    masks = random_masks(modules, 3, 0.5)
    ran = Pipeline(modules, schedule).run(masks)
    assert_equal(ran, expected(modules, ran.executed, masks))
    rounded = expected(in_full, ran.executed, masks)
    assert not torch.equal(ran.losses[0], rounded.losses[0]), "nothing was computed in float8"
