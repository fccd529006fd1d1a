"""What a reference finds, against the loss of outputs computed here."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.layered import Layer
from timelyfreeze.policies import ReferenceSettings
from timelyfreeze.policies.plasticity import similarity_loss
from timelyfreeze.runtime.reference.model import CapturedBatch, InlineReference

EXACT = ReferenceSettings(precision="float32")
SCALE = torch.tensor([1.5])
ROWS = torch.tensor([0, 3, 5])


def blocks(seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList([Layer(), Layer()]).requires_grad_(False)


def loaded(layers: nn.ModuleList, settings: ReferenceSettings) -> InlineReference:
    reference = InlineReference(settings)
    reference.load(layers)
    return reference


def through(layers: nn.ModuleList, hidden: Tensor, **kwargs: Any) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, SCALE.to(hidden.dtype), **kwargs)
    return hidden


def batch(layers: nn.ModuleList, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    hidden = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    output = through(layers.to(dtype), hidden, **kwargs).flatten(0, 1)[ROWS]
    return CapturedBatch(7, 2, (hidden, SCALE.to(dtype)), kwargs, ROWS, output)


@pytest.mark.parametrize("squared", [False, True])
def test_the_kept_rows_are_compared_with_those_of_the_copy(squared: bool) -> None:
    ours, theirs = blocks(0), blocks(1)
    captured = batch(ours, mask=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]))
    settings = ReferenceSettings(precision="float32", squared=squared)
    found = loaded(copy.deepcopy(theirs), settings).difference(captured)
    other = through(theirs, captured.args[0], **captured.kwargs).flatten(0, 1)[ROWS]
    wanted = similarity_loss(captured.output.numpy(), other.numpy(), squared=squared)
    assert (found.step, found.first) == (7, 2)
    assert found.value == pytest.approx(wanted, rel=1e-6)
    assert found.value > 1e-4


def test_a_copy_that_is_equal_has_no_distance() -> None:
    ours = blocks()
    assert loaded(copy.deepcopy(ours), EXACT).difference(batch(ours)).value == 0.0


def test_what_trains_in_bfloat16_is_compared_in_float32() -> None:
    found = loaded(blocks(), EXACT).difference(batch(blocks(), torch.bfloat16))
    assert 0.0 < found.value < 1e-3


def test_linear_layers_compute_in_8_bits() -> None:
    ours = blocks()
    model = loaded(copy.deepcopy(ours), ReferenceSettings())
    kinds = {type(module).__module__ for module in model._blocks.modules()}
    assert model.note is None
    assert "torch.ao.nn.quantized.dynamic.modules.linear" in kinds
    assert 0.0 < model.difference(batch(ours)).value < 1e-3


def test_dense_convolutions_compute_in_8_bits_and_those_by_group_do_not() -> None:
    """As a ConvNeXt's block has them: one that halves a picture, one by channel."""
    torch.manual_seed(0)
    ours = nn.ModuleList(
        [nn.Sequential(nn.Conv2d(8, 16, 2, 2), nn.Conv2d(16, 16, 3, padding=1, groups=16))]
    )
    pictures = torch.randn(4, 8, 8, 8)
    expected = ours[0](pictures).detach()
    captured = CapturedBatch(1, 0, (pictures,), {}, None, expected)
    model = loaded(copy.deepcopy(ours), ReferenceSettings())
    dense, by_channel = model._blocks[0]
    assert type(dense).__module__ == "torch.ao.nn.quantized.dynamic.modules.conv"
    assert type(by_channel) is nn.Conv2d
    assert 0.0 < model.difference(captured).value < 1e-3
    kept = expected.norm()
    assert 0.0 < (model._blocks[0](pictures) - expected).norm() < 0.05 * kept


def test_without_an_engine_for_8_bits_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is float32 on the host then; Egeria's other way, the GPU, trains."""

    class NoEngine:
        engine = "none"

    monkeypatch.setattr(torch.backends, "quantized", NoEngine)
    ours = blocks()
    model = loaded(copy.deepcopy(ours), ReferenceSettings())
    assert "no engine for 8 bits" in (model.note or "")
    assert model.difference(batch(ours)).value == 0.0


def test_blocks_that_return_several_things_give_the_first() -> None:
    class Several(nn.Module):
        def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor, str]:
            return hidden * scale, "attention"

    hidden = torch.eye(3)
    rows = torch.arange(3)
    captured = CapturedBatch(1, 0, (hidden, SCALE), {}, rows, hidden * 1.5**2)
    model = loaded(nn.ModuleList([Several(), Several()]), EXACT)
    assert model.difference(captured).value == 0.0


def test_an_inline_reference_answers_at_once_and_once() -> None:
    reference = InlineReference(EXACT)
    reference.load(blocks())
    assert reference.offer(batch(blocks()))
    ((found,), lost) = reference.take()
    assert (found.step, found.value, lost) == (7, 0.0, 0)
    assert reference.take() == ([], 0)
