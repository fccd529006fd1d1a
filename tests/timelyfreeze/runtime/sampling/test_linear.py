"""Sampled linear layers against exact products: in the mean, in variance, in work, to the bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.timelyfreeze.runtime.sampling.oracles import joint_probabilities, outcomes
from timelyfreeze.runtime.sampling import (
    TokenSample,
    TokenSampler,
    inclusion_probabilities,
    levelled,
)

N, IN, OUT = 12, 3, 4


class Flops(TorchDispatchMode):
    """Adds up the work of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.total += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


def make(
    dtype: torch.dtype = torch.float64, bias: bool = False
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, its input of 2 x 6 tokens, and the gradient of its output."""
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    for p in layer.parameters():
        nn.init.normal_(p, generator=generator)
    x = torch.randn(2, 6, IN, generator=generator, dtype=dtype)
    dy = torch.randn(2, 6, OUT, generator=generator, dtype=dtype)
    dy *= torch.rand(2, 6, 1, generator=generator, dtype=dtype) ** 3
    return layer, x, dy


def sample(ratio: float, input_ratio: float = 0.0, number: float = 0.3) -> TokenSample:
    return TokenSample(ratio, input_ratio, np.array([[number, number]]))


def gradients(
    layer: nn.Linear,
    x: Tensor,
    dy: Tensor,
    sampler: TokenSampler | None = None,
    how: TokenSample | None = None,
    call: Callable[..., Tensor] = lambda layer, x: layer(x),
) -> tuple[Tensor, list[Tensor]]:
    """Gradient of the input and of the parameters."""
    x = x.clone().requires_grad_()
    if sampler is None:
        found = torch.autograd.grad(call(layer, x), [x, *layer.parameters()], dy)
    else:
        with sampler.sampling(how):
            found = torch.autograd.grad(call(layer, x), [x, *layer.parameters()], dy)
    return found[0], list(found[1:])


def sizes_of(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes that decide about the weight and about the input gradient."""
    of_inputs = dy.flatten(0, 1).norm(dim=1)
    return of_inputs * x.flatten(0, 1).norm(dim=1), levelled(of_inputs)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_the_mean_over_every_draw_is_the_exact_gradient(ratio: float) -> None:
    layer, x, dy = make()
    exact_dx, (exact_dw,) = gradients(layer, x, dy)
    sampler = TokenSampler(layer)
    n_drawn = round((1 - ratio) * N)
    for which, sizes in enumerate(sizes_of(x, dy)):
        p = inclusion_probabilities(sizes, n_drawn).numpy()
        mean_dx, mean_dw = torch.zeros_like(exact_dx), torch.zeros_like(exact_dw)
        for number, length in outcomes(p):
            how = sample(*(ratio, 0.0) if which == 0 else (0.0, ratio), number)
            dx, (dw,) = gradients(layer, x, dy, sampler, how)
            mean_dx += length * dx
            mean_dw += length * dw
        # Factors are float32.
        torch.testing.assert_close(mean_dx, exact_dx, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mean_dw, exact_dw, rtol=1e-5, atol=1e-5)


def test_the_variance_over_every_draw_is_that_of_its_joint_probabilities() -> None:
    layer, x, dy = make()
    _, (exact,) = gradients(layer, x, dy)
    sampler = TokenSampler(layer)
    p = inclusion_probabilities(sizes_of(x, dy)[0], 6).numpy()
    variance = 0.0
    for number, length in outcomes(p):
        _, (dw,) = gradients(layer, x, dy, sampler, sample(0.5, number=number))
        variance += length * float((dw - exact).square().sum())
    terms = np.einsum("no,ni->noi", dy.flatten(0, 1).numpy(), x.flatten(0, 1).numpy())
    products = np.einsum("noi,moi->nm", terms, terms)
    wanted = ((joint_probabilities(p) / np.outer(p, p) - 1.0) * products).sum()
    assert variance == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_sample_or_with_ratio_zero_all_is_equal_to_the_bit(
    dtype: torch.dtype, bias: bool
) -> None:
    layer, x, dy = make(dtype, bias)
    dx, parameters = gradients(layer, x, dy)
    sampler = TokenSampler(layer)
    for how in (None, sample(0.0), sample(0.01, 0.01)):
        other_dx, others = gradients(layer, x, dy, sampler, how)
        assert torch.equal(dx, other_dx)
        assert all(map(torch.equal, parameters, others))


def test_in_bfloat16_the_mean_is_exact_up_to_rounding() -> None:
    layer, x, dy = make(torch.bfloat16)
    _, (exact,) = gradients(*(t.float() for t in make(torch.bfloat16)))  # type: ignore[arg-type]
    sampler = TokenSampler(layer)
    draws = [
        gradients(layer, x, dy, sampler, sample(0.5, number=(k + 0.5) / 400))[1][0].float()
        for k in range(400)
    ]
    torch.testing.assert_close(torch.stack(draws).mean(0), exact, rtol=0.02, atol=0.02)


def test_a_bias_gets_its_exact_gradient() -> None:
    layer, x, dy = make(bias=True)
    _, (dw, db) = gradients(layer, x, dy)
    sampler = TokenSampler(layer)
    _, (sampled_dw, sampled_db) = gradients(layer, x, dy, sampler, sample(0.5, 0.5))
    torch.testing.assert_close(db, sampled_db)
    assert not torch.allclose(dw, sampled_dw)


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_the_work_falls_by_the_ratio(ratio: float) -> None:
    layer, x, dy = make()

    def flops(*how: TokenSample) -> int:
        sampler = TokenSampler(layer) if how else None
        with Flops() as counter:
            gradients(layer, x, dy, sampler, *how)
        return counter.total

    product = 2 * N * IN * OUT
    assert flops() == 3 * product
    assert flops(sample(ratio)) == (3 - ratio) * product
    assert flops(sample(ratio, ratio)) == (3 - 2 * ratio) * product


def test_a_half_of_a_split_backward_computes_its_own_product_alone() -> None:
    layer, x, dy = make()
    sampler = TokenSampler(layer)
    x = x.requires_grad_()
    with sampler.sampling(sample(0.5, 0.5)):
        y = layer(x)
        dx, dw = torch.autograd.grad(y, [x, layer.weight], dy, retain_graph=True)
    for inputs, wanted, target in ((True, dx, x), (False, dw, layer.weight)):
        with (
            sampler.sampling(sample(0.5, 0.5), inputs=inputs, weights=not inputs),
            Flops() as counter,
        ):
            (found,) = torch.autograd.grad(y, [target], dy, retain_graph=True)
        assert torch.equal(found, wanted)
        assert counter.total == N * IN * OUT


def test_activations_that_are_computed_again_give_the_same() -> None:
    layer, x, dy = make()
    sampler = TokenSampler(layer)
    plain = gradients(layer, x, dy, sampler, sample(0.5, 0.5))
    again = gradients(
        layer, x, dy, sampler, sample(0.5, 0.5), lambda f, x: checkpoint(f, x, use_reentrant=False)
    )
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1][0], again[1][0])


def test_positions_without_a_gradient_cost_no_draw() -> None:
    layer, x, dy = make()
    dy[:, 2:] = 0.0  # 4 of 12 tokens have a target
    exact = gradients(layer, x, dy)
    sampled = gradients(layer, x, dy, TokenSampler(layer), sample(0.5, 0.5))
    torch.testing.assert_close(exact[0], sampled[0])
    torch.testing.assert_close(exact[1][0], sampled[1][0])


def test_under_autocast_products_are_in_its_type() -> None:
    layer, x, dy = make(torch.float32)
    sampler = TokenSampler(layer)
    with torch.autocast("cpu", torch.bfloat16):
        exact = gradients(layer, x, dy.bfloat16())
        sampled = gradients(layer, x, dy.bfloat16(), sampler, sample(0.01))
    assert exact[1][0].dtype == sampled[1][0].dtype == torch.float32
    torch.testing.assert_close(exact[0], sampled[0])
    torch.testing.assert_close(exact[1][0], sampled[1][0])


def test_only_layers_that_multiply_as_a_linear_layer_does_are_adopted() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    class Renamed(nn.Linear):
        """Multiplies as its base class does."""

    module = nn.Sequential(Doubled(3, 3), Renamed(3, 3), nn.Linear(3, 3), nn.Embedding(3, 3))
    assert TokenSampler(module).n_layers == 2
    assert type(module[0]) is Doubled
    assert isinstance(module[1], Renamed)
    assert set(module.state_dict()) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight"
    }  # fmt: skip
