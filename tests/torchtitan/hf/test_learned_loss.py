"""Loss and gradients of learned tokens alone, against the loss over all logits at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.models.llama3 import TransformerModelArgs

from torchtitan.data.sequences import learned_tokens
from torchtitan.hf import learned_loss as module
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.learned_loss import _CrossEntropy, learned_loss

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 40, 16, 301
# All at once; in blocks; computed again in parts, in blocks.
WAYS = {
    "whole": {},
    "blocks": {"BLOCK_BYTES": 4 * VOCABULARY * 7},
    "parts": {"BLOCK_BYTES": 4 * VOCABULARY * 7, "KEPT_BYTES": 2 * VOCABULARY * 11},
}


class Head(nn.Module):
    """A norm and an output layer, which counts the rows that it gets."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.seen: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append(len(rows))
        return self.output(self.norm(rows))


def some_labels() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
    labels[1] = -100
    return labels


def some_hidden() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator).requires_grad_()


def of_all(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden).flatten(0, 1).float()
    return cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)


def of_learned(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    found = learned_tokens(labels)
    return learned_loss(head, hidden, found["learned"], found["n_learned"].tolist(), VOCABULARY)


def gradients(loss: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


@contextmanager
def going(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in WAYS[way].items():
            patched.setattr(module, name, value)
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_over_all_logits(way: str, bias: bool) -> None:
    head, hidden, labels = Head(bias=bias), some_hidden(), some_labels()
    expected = of_all(head, hidden, labels)
    wanted = gradients(expected, head, hidden)
    head.seen.clear()
    with going(way):
        loss = of_learned(head, hidden, labels)
        found = gradients(loss, head, hidden)
    n = int((labels != -100).sum())
    once = n if way != "parts" else 2 * n  # again in the backward
    assert sum(head.seen) == once
    assert max(head.seen) == n if way != "parts" else max(head.seen) <= 6
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
        assert not ours.requires_grad, "a gradient that is kept would keep the graph"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_learned_is_exactly_nothing(way: str) -> None:
    head, hidden = Head(bias=True), some_hidden()
    with going(way):
        loss = of_learned(head, hidden, torch.full((ROWS, LENGTH), -100))
        assert float(loss.detach()) == 0.0
        for gradient in gradients(loss, head, hidden):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_logits_that_are_written_over_serve_no_second_backward() -> None:
    head, hidden = Head(bias=False), some_hidden()
    loss = of_learned(head, hidden, some_labels())
    torch.autograd.grad(loss, [hidden], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [hidden])


class Sizes(TorchDispatchMode):
    """Notes how many numbers of each type the largest tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            known = self.largest.get(tensor.dtype, 0)
            self.largest[tensor.dtype] = max(known, tensor.numel())
        return result


def largest(compute: Callable[..., Tensor], *, autocast: bool) -> dict[torch.dtype, int]:
    head, hidden, labels = Head(bias=False), some_hidden(), some_labels()
    if not autocast:
        head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    casting = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with Sizes() as sizes:
        with casting:
            loss = compute(head, hidden, labels)
        gradients(loss, head, hidden)
    return sizes.largest


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_never_stand_whole_in_float32(autocast: bool) -> None:
    logits = int((some_labels() != -100).sum()) * VOCABULARY
    assert largest(of_all, autocast=autocast)[torch.float32] > logits  # so that one would be seen
    with going("blocks"):
        sizes = largest(of_learned, autocast=autocast)
    assert sizes[torch.bfloat16] == logits
    # A block, or where autocast keeps them, a weight and its gradient.
    assert sizes[torch.float32] <= max(7, WIDTH) * VOCABULARY
    with going("parts"):
        assert max(largest(of_learned, autocast=autocast).values()) <= WIDTH * VOCABULARY


def test_what_is_computed_again_under_autocast_is_the_same_to_the_bit() -> None:
    def ran(**limits: int) -> list[Tensor]:
        head, hidden = Head(bias=False), some_hidden()
        with pytest.MonkeyPatch.context() as patched:
            for name, value in limits.items():
                patched.setattr(module, name, value)
            with torch.autocast("cpu", torch.bfloat16):
                loss = of_learned(head, hidden, some_labels())
            return gradients(loss, head, hidden)[:1]

    n = int((some_labels() != -100).sum())
    (kept,) = ran(KEPT_BYTES=2 * VOCABULARY * n)
    (again,) = ran(KEPT_BYTES=2 * VOCABULARY * n - 1)  # in two parts
    assert torch.equal(kept, again)


def test_a_model_gives_the_loss_where_it_would_give_logits() -> None:
    args = TransformerModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=VOCABULARY)
    model = Decoder(args)
    with torch.no_grad():
        model.init_weights()
    tokens, labels = torch.randint(VOCABULARY, (ROWS, LENGTH)), some_labels()
    expected = of_all(model, tokens, labels)
    loss = model(tokens, **learned_tokens(labels))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    model.output = None  # a stage that is not the last sends what it computes
    assert model(tokens, **learned_tokens(labels)).shape == (ROWS, LENGTH, 32)


def test_gradients_of_queries_are_as_near_double_precision_as_those_over_all_logits() -> None:
    """They are small differences of large terms where biases are large, and show each rounding."""
    torch.manual_seed(0)
    logits, labels = 4.0 * torch.randn(40, 512), torch.randint(512, (40,))
    weights = torch.randn(512, 8)

    def gradient(dtype: torch.dtype, learned: bool) -> torch.Tensor:
        leaf = logits.to(dtype).requires_grad_()
        given = leaf * 1.0
        if learned:
            loss = _CrossEntropy.apply(given, labels, None)
        else:
            loss = cross_entropy(given, labels, reduction="sum")
        (found,) = torch.autograd.grad(loss, leaf)
        return found.double() @ weights.double()

    exact = gradient(torch.float64, False)
    dense, ours = (
        float((gradient(torch.float32, learned) - exact).norm()) for learned in (False, True)
    )
    assert 0.0 < ours < 1.5 * dense
