"""Rotary embeddings under ``model.rope_*``, against the published formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis

from torchtitan.hf.flavors import with_rope_settings
from torchtitan.settings.job_config import JobConfig

DIM, LENGTH, THETA = 64, 48, 500000.0


def rope(factor: float | None, **more: float) -> Tensor:
    """The table that a model gets under ``model.rope_scaling_factor``."""
    config = JobConfig()
    config.model.rope_scaling_factor = factor
    for name, value in more.items():
        setattr(config.model, f"rope_{name}", value)
    args = with_rope_settings(TransformerModelArgs(rope_theta=THETA), config)
    return precompute_freqs_cis(DIM, LENGTH, args.rope_theta, args.rope_scaling_args)


def llama_31_rope(
    factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192
) -> Tensor:
    """Llama 3.1's rule, band by band in double precision, as its authors describe it.

    Waves shorter than original/high stay, those longer than original/low are stretched by the
    factor, and in between the fraction that is stretched grows with the number of turns.
    """
    frequencies = []
    for i in range(0, DIM, 2):
        frequency = THETA ** (-i / DIM)
        turns = original * frequency / (2 * math.pi)
        if turns > high:
            scaled = frequency
        elif turns < low:
            scaled = frequency / factor
        else:
            keep = (turns - low) / (high - low)
            scaled = keep * frequency + (1 - keep) * frequency / factor
        frequencies.append(scaled)
    angles = torch.outer(
        torch.arange(LENGTH, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64)
    )
    return torch.polar(torch.ones_like(angles), angles)


def test_factor_1_is_the_plain_formula_to_the_last_bit() -> None:
    """Guards llama3's ``RoPEScalingArgs``, which cannot be left out."""
    frequencies = 1.0 / (THETA ** (torch.arange(0, DIM, 2).float() / DIM))
    angles = torch.outer(torch.arange(LENGTH), frequencies)
    assert torch.equal(rope(1.0), torch.polar(torch.ones_like(angles), angles))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_factor_follows_the_rule_of_llama_31(factor: float) -> None:
    table = rope(factor)
    torch.testing.assert_close(table.to(torch.complex128), llama_31_rope(factor), rtol=0, atol=1e-5)
    assert not torch.allclose(table, rope(1.0))


def test_the_other_rope_keys_reach_the_rule() -> None:
    table = rope(
        16.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_position_embeddings=1024
    )
    wanted = llama_31_rope(16.0, 2.0, 8.0, 1024)
    torch.testing.assert_close(table.to(torch.complex128), wanted, rtol=0, atol=1e-5)


def test_upstream_still_scales_by_8_unless_told_otherwise() -> None:
    """Guards ``RoPEScalingArgs``: wrong for Llama 2, Llama 3, SmolLM2 and Llama 3.2."""
    assert RoPEScalingArgs().scaling_factor == 8.0
    assert torch.equal(rope(None), rope(8.0))
    args = TransformerModelArgs()
    assert with_rope_settings(args, JobConfig()) is args


def test_a_flavors_own_values_are_not_changed() -> None:
    args = TransformerModelArgs(rope_scaling_args=RoPEScalingArgs(low_freq_factor=3.0))
    before = replace(args.rope_scaling_args)
    config = JobConfig()
    config.model.rope_scaling_factor = 2.0
    changed = with_rope_settings(args, config)
    assert args.rope_scaling_args == before
    assert changed.rope_scaling_args == replace(before, scaling_factor=2.0)


def test_rope_keys_need_a_model_that_has_rope_scaling() -> None:
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    config = JobConfig()
    config.model.name = "qwen3"
    assert isinstance(with_rope_settings(Qwen3ModelArgs(), config), Qwen3ModelArgs)
    config.model.rope_scaling_factor = 8.0
    with pytest.raises(
        ValueError,
        match=r"model.rope_\* is set but model.name is 'qwen3', which has no RoPE scaling",
    ):
        with_rope_settings(Qwen3ModelArgs(), config)
