#!/usr/bin/env python
"""Measure what frozen linear layers cost that still get a gradient in a subspace.

Usage: python benchmarks/low_rank_cost.py [--shapes 135M 1B 8B] [--tokens 1024] [--dtype float32]
                                       [--ranks 16 32 64 128] [--repeats 15]

For each shape, forward and backward of the seven linear layers of one LLaMA block, input gradients
included: the time with exact weight gradients; then, over that, the time with none and with those
of each rank, and the time of turning all subspaces once, which a step does for all of its
microbatches. All of them take turns, and the median of each counts. On a GPU if there is one.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from timelyfreeze.files import markdown_table
from timelyfreeze.runtime.low_rank import LowRankLayers, next_basis
from torchtitan.upstream.cpu_device import CpuDevice

# Width, width of keys and values, width of the feed-forward.
SHAPES = {"135M": (576, 192, 1536), "1B": (2048, 512, 8192), "8B": (4096, 1024, 14336)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Block:
    """The linear layers of a block, with inputs and gradients of outputs."""

    def __init__(self, shape: str, n_tokens: int, device: str, dtype: torch.dtype) -> None:
        width, keys, inner = SHAPES[shape]
        sizes = [(width, width), (width, keys), (width, keys), (width, width)]
        sizes += [(width, inner), (width, inner), (inner, width)]
        made = (nn.Linear(*size, bias=False, device=device, dtype=dtype) for size in sizes)
        self.layers = nn.ModuleList(made)
        self._xs = [torch.randn(n_tokens, n, device=device, dtype=dtype) for n, _ in sizes]
        self._dys = [torch.randn(n_tokens, n, device=device, dtype=dtype) for _, n in sizes]
        self.weights = dict(self.layers.named_parameters())

    def pass_ms(self, low_rank: LowRankLayers | None, *, exact: bool = False) -> float:
        """Return the time of a microbatch; without subspaces frozen weights get nothing."""
        for weight in self.weights.values():
            weight.requires_grad_(exact or low_rank is not None)
            weight.grad = None
        if low_rank is None:
            return timed_ms(self._run)
        with low_rank.action_of(0, self.weights.keys()):
            found = timed_ms(self._run)
        low_rank.end_batch()
        return found

    def _run(self) -> None:
        inputs = [x.detach().requires_grad_() for x in self._xs]
        outputs = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        torch.autograd.backward(outputs, self._dys)


def timed_ms(run: Callable[[], object]) -> float:
    """Return what a call takes on the device, milliseconds."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def turn(low_rank: LowRankLayers, gradients: dict[str, Tensor]) -> None:
    """Look for the next directions of all layers."""
    for name, gradient in gradients.items():
        next_basis(low_rank.bases[name], gradient, 0, 1, name)


def measure(
    shape: str, n_tokens: int, dtype: torch.dtype, ranks: list[int], repeats: int
) -> list[float]:
    """Return median times: exact, with nothing, then of a microbatch and a turn for each rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact, nothing = (Block(shape, n_tokens, device, dtype) for _ in range(2))
    ways: list[Callable[[], float]] = [
        lambda: exact.pass_ms(None, exact=True),
        lambda: nothing.pass_ms(None),
    ]
    for rank in ranks:
        block = Block(shape, n_tokens, device, dtype)
        low_rank = LowRankLayers(block.weights, block.layers, rank=rank, seed=0)
        gradients = {name: torch.randn_like(weight) for name, weight in block.weights.items()}
        ways += [
            lambda block=block, low_rank=low_rank: block.pass_ms(low_rank),
            lambda low_rank=low_rank, gradients=gradients: timed_ms(
                lambda: turn(low_rank, gradients)
            ),
        ]
    times = [[way() for way in ways] for _ in range(repeats + 2)][2:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def machine() -> str:
    """Return what the times were measured on."""
    device = torch.cuda if torch.cuda.is_available() else CpuDevice
    return (
        f"{device.get_device_name()}, {os.cpu_count()} cores, {platform.system()}, "
        f"torch {torch.__version__}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    rows = []
    for shape in options.shapes:
        exact, nothing, *others = measure(
            shape, options.tokens, DTYPES[options.dtype], options.ranks, options.repeats
        )
        pairs = zip(others[::2], others[1::2], strict=True)
        cells = [f"{inside / exact:.2f} ({a_turn / exact:.2f})" for inside, a_turn in pairs]
        rows.append([shape, f"{exact:.2f}", f"{nothing / exact:.2f}", *cells])
    print(f"{machine()}; {options.tokens} tokens, {options.dtype}\n")
    head = ["block", "exact, ms", "nothing", *(f"rank {rank} (a turn)" for rank in options.ranks)]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
