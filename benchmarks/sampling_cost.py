#!/usr/bin/env python
"""Measure how much of the time of weight gradients sampled tokens save.

Usage: python benchmarks/sampling_cost.py [--shapes 135M 1B 8B] [--tokens 1024] [--dtype float32]
                                       [--ratios 0.1 0.3 0.5] [--repeats 15]

For each shape, the seven linear layers of one LLaMA block, with random inputs and gradients of
uneven size: the time of their exact weight gradients; then for each ratio the fraction of it that
is saved, and the fraction that norms, draw and gathering cost, so that saved + cost = ratio. Exact
and sampled products take turns, and the median of each counts. On a GPU if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from processes import machine
from torch import Tensor, nn

from timelyfreeze.files import markdown_table
from timelyfreeze.runtime.sampling import TokenSample, TokenSampler

# Width, width of keys and values, width of the feed-forward.
SHAPES = {"135M": (576, 192, 1536), "1B": (2048, 512, 8192), "8B": (4096, 1024, 14336)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def linear_layers(shape: str, device: str, dtype: torch.dtype) -> nn.ModuleList:
    """Return query, key, value, output, gate, up and down of a block."""
    width, keys, inner = SHAPES[shape]
    sizes = [(width, width), (width, keys), (width, keys), (width, width)]
    sizes += [(width, inner), (width, inner), (inner, width)]
    return nn.ModuleList(nn.Linear(*s, bias=False, device=device, dtype=dtype) for s in sizes)


def gradients_ms(
    layers: nn.ModuleList, xs: Sequence[Tensor], dys: Sequence[Tensor], sample: TokenSample | None
) -> float:
    """Return the time of all weight gradients, milliseconds."""
    sampler: TokenSampler = layers[0].sampler
    wait = torch.cuda.synchronize if xs[0].is_cuda else lambda: None
    with sampler.sampling(sample, inputs=False):
        wait()
        begin = time.perf_counter()
        for i in reversed(range(len(layers))):
            sampler.gradients(i, xs[i], layers[i].weight, dys[i], (False, True))
        wait()
        return 1e3 * (time.perf_counter() - begin)


def measure(
    shape: str, n_tokens: int, dtype: torch.dtype, ratios: Sequence[float], repeats: int
) -> list[float]:
    """Return the median time of exact weight gradients, then of those at each ratio."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = linear_layers(shape, device, dtype)
    TokenSampler(layers)
    torch.manual_seed(0)
    uneven = torch.rand(n_tokens, 1, device=device, dtype=dtype).square()
    shared: dict[int, Tensor] = {}
    xs = []
    for i, layer in enumerate(layers):
        # Query, key and value have one input, and so have gate and up.
        group = {1: 0, 2: 0, 5: 4}.get(i, i)
        if group not in shared:
            shared[group] = torch.randn(n_tokens, layer.in_features, device=device, dtype=dtype)
        xs.append(shared[group])
    dys = [
        torch.randn(n_tokens, layer.out_features, device=device, dtype=dtype) * uneven
        for layer in layers
    ]
    numbers = np.full((len(layers), 2), 0.5)
    samples = [None, *(TokenSample(ratio, 0.0, numbers) for ratio in ratios)]
    times: list[list[float]] = [[] for _ in samples]
    for turn in range(2 + repeats):
        for own, sample in zip(times, samples, strict=True):
            spent_ms = gradients_ms(layers, xs, dys, sample)
            if turn >= 2:
                own.append(spent_ms)
    return [statistics.median(own) for own in times]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="What sampled tokens save of weight gradients.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=1024, help="of a microbatch (default 1024)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.3, 0.5])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    rows = []
    for shape in options.shapes:
        exact_ms, *sampled_ms = measure(
            shape, options.tokens, DTYPES[options.dtype], options.ratios, options.repeats
        )
        saved = [1.0 - ms / exact_ms for ms in sampled_ms]
        cells = [f"{s:.2f} ({r - s:.2f})" for s, r in zip(saved, options.ratios, strict=True)]
        rows.append([shape, f"{exact_ms:.2f}", *cells])
    threads = "" if torch.cuda.is_available() else f", {torch.get_num_threads()} threads"
    print(f"{machine()}{threads}, {options.tokens} tokens, {options.dtype}\n")
    columns = [f"ratio {ratio:g}: saved (cost)" for ratio in options.ratios]
    print(markdown_table(["shape", "exact, ms", *columns], rows))


if __name__ == "__main__":
    main()
