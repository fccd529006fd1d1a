"""What is captured: of which microbatch, which tokens, and that it does not change any more."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.layered import Layer
from tests.timelyfreeze.runtime.reference.test_model import loaded
from timelyfreeze.policies import ReferenceSettings
from timelyfreeze.runtime.reference.capture import Capture

SCALE = torch.tensor([1.5])
EXACT = ReferenceSettings(precision="float32")
B, T, D = 3, 4, 5


class Blocks:
    """Two blocks under a stage that says which microbatch runs."""

    def __init__(self, n_tokens: Sequence[int] | None = None, max_tokens: int = 100) -> None:
        self.stage: Any = SimpleNamespace(forwarding=None)
        self.layers = [Layer(), Layer()]
        self.capture = Capture(
            self.stage,
            self.layers,
            step=9,
            first=4,
            max_tokens=max_tokens,
            n_tokens=lambda: n_tokens,
        )

    def run(self, microbatch: int | None, value: float) -> tuple[Tensor, Tensor]:
        self.stage.forwarding = microbatch
        hidden = torch.full((B, T, D), value) + torch.arange(B * T * D).reshape(B, T, D)
        output = self.layers[1](self.layers[0](hidden, SCALE), SCALE)
        self.stage.forwarding = None
        return hidden, output


def test_the_first_microbatch_of_the_first_batch_is_kept() -> None:
    blocks = Blocks()
    blocks.run(None, 1.0)  # validation
    blocks.run(1, 2.0)
    assert blocks.capture.batch is None
    hidden, output = blocks.run(0, 3.0)
    blocks.run(0, 4.0)
    batch = blocks.capture.batch
    assert batch is not None
    assert (batch.step, batch.first, batch.kwargs) == (9, 4, {})
    assert torch.equal(batch.args[0], hidden)
    assert torch.equal(batch.args[1], SCALE)
    assert torch.equal(batch.output, output.flatten(0, 1))
    assert not batch.output.requires_grad


def test_what_is_kept_does_not_change_with_its_source() -> None:
    blocks = Blocks()
    hidden, _ = blocks.run(0, 3.0)
    batch = blocks.capture.batch
    assert batch is not None
    kept = batch.args[0].clone()
    hidden.zero_()
    assert torch.equal(batch.args[0], kept)


@pytest.mark.parametrize(
    ("n_tokens", "max_tokens", "wanted"),
    [
        (None, 100, list(range(12))),
        (None, 4, [0, 3, 6, 9]),
        ([2, 4, 1], 100, [0, 1, 4, 5, 6, 7, 8]),
        ([2, 4, 1], 3, [0, 4, 6]),  # places 0, 2 and 4 of those
        ([2, 4, 1, 4, 4], 100, [0, 1, 4, 5, 6, 7, 8]),  # rows of later microbatches
        ([0, 0, 0], 100, list(range(12))),
    ],
)
def test_tokens_are_taken_evenly_from_what_is_no_padding(
    n_tokens: list[int] | None, max_tokens: int, wanted: list[int]
) -> None:
    blocks = Blocks(n_tokens, max_tokens)
    _, output = blocks.run(0, 1.0)
    batch = blocks.capture.batch
    assert batch is not None
    assert batch.rows is not None
    assert batch.rows.tolist() == wanted
    assert torch.equal(batch.output, output.flatten(0, 1)[wanted])


@pytest.mark.parametrize(
    ("shape", "max_tokens"), [((4, 3, 2, 2), 100), ((4, 6, 5), 0), ((4, 5), 100)], ids=str
)
def test_pictures_are_compared_whole(shape: tuple[int, ...], max_tokens: int) -> None:
    """Rows of App. B: b of c h w values; not rows of pixels, nor patches of a ViT."""
    stage: Any = SimpleNamespace(forwarding=0)
    torch.manual_seed(0)
    block, copied = nn.Tanh(), nn.Sigmoid()
    capture = Capture(stage, [block], step=1, first=0, max_tokens=max_tokens)
    hidden = torch.randn(shape)
    output = block(hidden)
    assert capture.batch is not None
    found = loaded(nn.ModuleList([copied]), EXACT).difference(capture.batch)
    alike = []
    for of_model in (output, copied(hidden)):
        rows = of_model.reshape(4, -1).double()
        products = rows @ rows.T
        alike.append(products / products.norm(dim=1, keepdim=True))
    assert found.value == pytest.approx(float(((alike[0] - alike[1]) ** 2).sum() / 16), rel=1e-5)


def test_one_picture_alone_is_like_no_other() -> None:
    stage: Any = SimpleNamespace(forwarding=0)
    block = nn.Tanh()
    Capture(stage, [block], step=1, first=0, max_tokens=9)
    with pytest.raises(ValueError, match="a microbatch has one example"):
        block(torch.ones(1, 3, 2, 2))


def test_a_block_that_is_computed_again_is_not_captured() -> None:
    blocks = Blocks()
    blocks.run(0, 1.0)
    first = blocks.capture.batch
    blocks.run(None, 2.0)  # as a backward does that recomputes
    assert blocks.capture.batch is first


def test_removed_hooks_capture_nothing() -> None:
    blocks = Blocks()
    blocks.capture.remove()
    blocks.run(0, 1.0)
    assert blocks.capture.batch is None


def test_tuples_travel_with_their_tensors() -> None:
    """As transformers hands cosines and sines to its blocks."""

    class Turned(nn.Module):
        def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
            return hidden * turn[0] + turn[1]

    stage: Any = SimpleNamespace(forwarding=0)
    layer, turn = Turned(), (torch.ones(1).double(), torch.full((1,), 2.0).double())
    capture = Capture(stage, [layer], step=9, first=4, max_tokens=100, n_tokens=lambda: None)
    hidden = torch.arange(B * T * D).reshape(B, T, D).double()
    layer(hidden, turn)
    turn[1].zero_()  # the copy stays
    batch = capture.batch
    assert batch is not None
    assert loaded(nn.ModuleList([layer]), EXACT).difference(batch).value == pytest.approx(
        0.0, abs=1e-6
    )


def test_arguments_that_cannot_travel_are_refused() -> None:
    blocks = Blocks()
    blocks.stage.forwarding = 0
    with pytest.raises(ValueError, match="Layer is called without a hidden state"):
        blocks.layers[0]("text", SCALE)
    with pytest.raises(ValueError, match="called with a object, which cannot be handed"):
        blocks.layers[0](torch.ones(B, T, D), SCALE, mask=object())


def test_several_outputs_give_the_first() -> None:
    class Several(nn.Module):
        def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
            return 2 * hidden, None

    stage: Any = SimpleNamespace(forwarding=0)
    block = Several()
    capture = Capture(stage, [block], step=1, first=0, max_tokens=9)
    block(torch.ones(2, 3))
    assert capture.batch is not None
    assert torch.equal(capture.batch.output, torch.full((2, 3), 2.0))
