#!/usr/bin/env python
"""Measure what freezing saves in compiled blocks, against single tensors of eager blocks.

Usage: python benchmarks/compiled_blocks.py [--backend inductor] [--dim 256] [--layers 5] [--rows 4]
                                         [--length 256] [--repeats 15] [--ratios 0 0.5 0.8]

A middle stage of LLaMA blocks runs forward and backward of one microbatch, eager with masks over
tensors and compiled with masks over blocks, each ratio in turn with new masks, over and over. The
eager stage also runs masks over blocks, to tell compiling from whole blocks. On a CPU times are
processor times of the one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor, nn
from torchtitan.config.job_config import Compile
from torchtitan.models.llama3.infra.parallelize import apply_compile
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from timelyfreeze.masks import build_parameter_table, build_units, draw_uniform, mask_rng
from timelyfreeze.runtime import CompiledBlocks, masked_full_backward


class Stage(nn.Module):
    """The blocks of a model, without what is in front and behind."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.layers = model.layers
        self.freqs_cis = model.freqs_cis

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the blocks one after the other."""
        for block in self.layers.values():
            hidden = block(hidden, self.freqs_cis, None, None)
        return hidden


class Runner:
    """One way to run a stage: eager or compiled, masks over tensors or over blocks."""

    def __init__(self, stage: Stage, *, whole_blocks: bool) -> None:
        self._stage = stage
        self._parameters = list(stage.parameters())
        named = [(name, p.numel()) for name, p in stage.named_parameters()]
        of_block: dict[str, list[int]] = {}
        for i, (name, _) in enumerate(named):
            of_block.setdefault(name.split(".")[1], []).append(i)
        blocks = list(of_block.values()) if whole_blocks else []
        self.units = build_units(build_parameter_table(named), blocks)
        self._compiled = CompiledBlocks(stage)

    def run(
        self, inputs: Tensor, ratio: float, number: int, now: Callable[[], float]
    ) -> list[float]:
        """Return the milliseconds of forward and backward of microbatch ``number``."""
        rng = mask_rng(0, 1, 0, number, 1)
        mask = self.units.spread(draw_uniform(self.units.table, ratio, rng))
        hidden = inputs.clone().requires_grad_()
        start = now()
        with self._compiled.without_weight_gradients(mask):
            output = self._stage(hidden)
        middle = now()
        live = [p for p, is_frozen in zip(self._parameters, mask, strict=True) if not is_frozen]
        masked_full_backward(output, torch.ones_like(output), [hidden], live)
        end = now()
        for parameter in self._parameters:
            parameter.grad = None
        return [1e3 * (middle - start), 1e3 * (end - middle)]


def build_runners(arguments: argparse.Namespace, device: torch.device) -> dict[str, Runner]:
    """Return the three ways, with equal weights."""
    torch.manual_seed(0)
    sizes = {
        "dim": arguments.dim, "n_layers": arguments.layers, "n_heads": 8, "n_kv_heads": 4,
        "vocab_size": 64, "max_seq_len": arguments.length,
    }  # fmt: skip
    model = Transformer(TransformerModelArgs(**sizes))
    with torch.no_grad():
        model.init_weights()
    model.to(device)
    eager = Stage(copy.deepcopy(model))
    apply_compile(model, Compile(enable=True, backend=arguments.backend))
    return {
        "eager, tensors": Runner(eager, whole_blocks=False),
        "eager, blocks": Runner(eager, whole_blocks=True),
        "compiled, blocks": Runner(Stage(model), whole_blocks=True),
    }


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.set_num_threads(1)
    runners = build_runners(arguments, device)
    inputs = torch.randn(arguments.rows, arguments.length, arguments.dim, device=device)

    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()

    for ratio in (0.0, 1.0):
        start = time.perf_counter()
        runners["compiled, blocks"].run(inputs, ratio, 0, now)
        took_s = time.perf_counter() - start  # the C++ compiler is a process of its own
        yield f"first microbatch with ratio {ratio:g}, compiling: {took_s:.1f} s"
    cases = list(itertools.product(arguments.ratios, runners))
    times_ms = pd.DataFrame(
        [ratio, name, *(took_ms := runners[name].run(inputs, ratio, repeat, now)), sum(took_ms)]
        for repeat in range(arguments.repeats + 1)
        for ratio, name in cases
    )[len(cases) :]  # the first of each is cold
    yield "ratio  way               forward ms           backward ms          both"
    for (ratio, name), runs in times_ms.groupby([0, 1], sort=False):
        yield f"{ratio:5.2f}  {name:16s}  {'  '.join(_spread(runs[i]) for i in (2, 3, 4))}"


def _spread(times_ms: pd.Series[float]) -> str:
    """Return mean and quartiles; with whole blocks a median would show one of few ratios alone."""
    low, high = times_ms.quantile([0.25, 0.75])
    return f"{times_ms.mean():6.1f} ({low:5.1f}-{high:5.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.5, 0.8])
    sizes = {"dim": 256, "layers": 5, "rows": 4, "length": 256, "repeats": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for line in measure(parser.parse_args(arguments)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
