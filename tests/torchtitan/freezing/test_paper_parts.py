"""The part that APF and AutoFreeze freeze with the values of the paper's files, of pure noise.

Gradients are independent normal numbers. They go through the optimizer and the learning rate of the
file, the product's meter and its policies, so that nothing but the number of checks decides.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from timelyfreeze.policies import Check, FreezePolicy, Metric
from timelyfreeze.policies.layout import build_layout
from timelyfreeze.runtime.meters.change_meter import ChangeMeter
from torchtitan.freezing.launch import read_config
from torchtitan.settings import JobConfig

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "train_configs"
# Layers; parts frozen by APF and AutoFreeze, as docs/paper.md has them.
PARTS = {
    "paper_llama3_2_1b": (16, 0.49, 0.47),
    "paper_llama3_8b": (32, 0.19, 0.50),
    "paper_llama2_13b": (40, 0.19, 0.66),
    "paper_vit_l32": (24, 0.36, 0.43),
    "paper_convnextv2_l": (36, 0.38, 0.22),
}


def read(name: str) -> JobConfig:
    path = FOLDER / f"{name}.toml"
    return read_config([f"--job.config_file={path}", "--checkpoint.no_initial_load_in_hf"])


def weights_under_noise(config: JobConfig, n: int) -> Iterator[torch.nn.Parameter]:
    """Yield the weights, [n], after each step of the run."""
    torch.manual_seed(0)
    settings, warm, steps = (
        config.optimizer,
        config.lr_scheduler.warmup_steps,
        config.training.steps,
    )
    weight = torch.nn.Parameter(0.02 * torch.randn(n))
    if settings.name == "AdamW":
        betas = (settings.beta1, settings.beta2)
        optimizer = torch.optim.AdamW(
            [weight], settings.lr, betas, weight_decay=settings.weight_decay, fused=True
        )
    else:
        optimizer = torch.optim.SGD([weight], settings.lr, settings.beta1, fused=True)
    yield weight
    for step in range(1, steps + 1):
        falling = (1.0 + math.cos(math.pi * max(0, step - warm) / (steps - warm))) / 2.0
        optimizer.param_groups[0]["lr"] = settings.lr * min(1.0, step / warm) * falling
        weight.grad = torch.randn(n)
        optimizer.step()
        yield weight


@pytest.mark.parametrize("name", PARTS)
def test_apf(name: str) -> None:
    config, n = read(name), 4000
    apf, part = config.freezing.apf, PARTS[name][1]
    weights = weights_under_noise(config, n)
    meter = ChangeMeter([("w", next(weights))], apf.measurement)
    meter.begin()
    shares = [0.0]
    for step, _ in enumerate(weights, 1):
        if is_checked := step % apf.check_interval == 0:
            settled = meter.take()[Metric.SETTLED][0] or 0.0
        shares.append(settled / n if is_checked else shares[-1])
    assert np.mean(shares) == pytest.approx(part, abs=0.02)


def frozen_part(rule: FreezePolicy, n_layers: int, n_steps: int, first: int, seed: int) -> float:
    """Return the part of layers frozen over a run whose gradient norms scatter by 30%."""
    layout = build_layout({0: [(f"layers.{i}.w", 1) for i in range(n_layers)]})
    random, frozen = np.random.default_rng(seed), 0.0
    decision = rule.start(Check(0, layout, {}, 0))
    for number in range(1, n_steps // rule.check_interval + 1):
        norms = np.exp(0.3 * random.standard_normal(n_layers))
        decision = rule.decide(decision, Check(number, layout, {Metric.SQUARE_SUM: norms**2}, 0))
        begin, end = (min(n_steps, k * rule.check_interval) for k in (number, number + 1))
        frozen += decision.frozen.mean() * max(0, end - max(begin, first))
    return frozen / n_steps


@pytest.mark.parametrize("name", PARTS)
def test_autofreeze(name: str) -> None:
    config = read(name)
    n_layers, _, part = PARTS[name]
    rule = config.freezing.autofreeze
    if rule.checks_per_epoch:
        rule = rule.in_epochs_of(52_002 / config.training.global_batch_size)
    run = rule, n_layers, config.training.steps, config.freezing.last_warmup_step
    parts = [frozen_part(*run, seed) for seed in range(40)]
    assert np.mean(parts) == pytest.approx(part, abs=0.05)
