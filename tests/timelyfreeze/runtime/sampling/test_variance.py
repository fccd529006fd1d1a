"""The measured variance against what draws of the same gradients really add."""

import numpy as np
import pytest
import torch
from torch import nn

from timelyfreeze.planning import MEASURED_RATIOS
from timelyfreeze.runtime.sampling import TokenSampler, VarianceMeter
from timelyfreeze.runtime.sampling.draw import inclusion_probabilities


def backward(module: nn.Module, meter: VarianceMeter | None, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 3, generator=generator)
    sampler = TokenSampler(module)
    with sampler.sampling(None, meter=meter):
        (module(x).square() * torch.rand(24, 1, generator=generator)).sum().backward()


def test_the_curve_is_the_variance_of_independent_draws_over_the_gradients_size() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    meter = VarianceMeter()
    backward(layer, meter)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator)
    y = layer(x).detach()
    dy = 2.0 * y * torch.rand(24, 1, generator=generator)
    terms = (x.norm(dim=1) * dy.norm(dim=1)).double()
    size = float((dy.T @ x).double().square().sum())
    curve = meter.curve()
    assert curve is not None
    for ratio, found in zip(MEASURED_RATIOS, curve, strict=True):
        p = inclusion_probabilities(terms, round((1 - ratio) * 24)).numpy()
        rng = np.random.default_rng(1)
        kept = rng.random((4000, 24)) < p
        factors = torch.tensor(kept / p, dtype=torch.float32)
        draws = torch.einsum("kn,no,ni->koi", factors, dy, x)
        wanted = float(draws.var(dim=0, correction=0).sum()) / size
        assert found == pytest.approx(wanted, rel=0.1, abs=1e-6)


def test_gradients_stay_those_of_an_exact_backward() -> None:
    torch.manual_seed(0)
    plain, measured = nn.Linear(3, 2), nn.Linear(3, 2)
    measured.load_state_dict(plain.state_dict())
    backward(plain, None)
    backward(measured, VarianceMeter())
    assert torch.equal(plain.weight.grad, measured.weight.grad)  # type: ignore[arg-type]


def test_layers_count_by_their_parameters_and_microbatches_add_up() -> None:
    torch.manual_seed(0)
    both = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))
    meter = VarianceMeter()
    for seed in (0, 1):
        backward(both, meter, seed)
    sums = {layer: row.numpy() for layer, row in meter._sums.items()}
    wanted = sum(n * sums[k][:-1] / sums[k][-1] for k, n in ((0, 15), (1, 35))) / 50
    assert meter.curve() == pytest.approx(tuple(wanted))
    assert meter.curve() == tuple(sorted(meter.curve() or ()))


def test_nothing_is_known_of_layers_without_gradients() -> None:
    meter = VarianceMeter()
    assert meter.curve() is None
    meter.add(0, torch.zeros(4), torch.zeros(2, 2))
    assert meter.curve() is None
