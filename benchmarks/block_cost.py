#!/usr/bin/env python
"""Measure what a transformer block costs that learns exactly, at a rank, not at all, by LoRA.

Usage: python benchmarks/block_cost.py [--models Llama-3.2-1B Llama-3-8B] [--rows 2 4]
           [--tokens 1024] [--dtype bfloat16] [--ranks 16 32 64] [--repeats 15]

For each model its first block, in a stage as a run has it, and of three microbatches of ROWS x
TOKENS the second: what is done once a batch is in the others. All ways take turns, and the median
of each counts. Kernels are those of one pass, and their sum, on a GPU; on a CPU operations that are
no views. Saved is what a microbatch keeps for its backward, but for weights. A share of the peak
counts the operations of an exact pass.
"""

import argparse
import os
import platform
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import torchtitan.tools.utils as titan_tools
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from timelyfreeze.files import markdown_table
from timelyfreeze.policies import LORA
from timelyfreeze.schedule import ActionKind
from torchtitan.freezing.profile.bench import Bench, Repeats
from torchtitan.freezing.profile.profile import quiet_process
from torchtitan.freezing.spec import build_train_spec
from torchtitan.settings.job_config import JobConfig, job_config_class
from torchtitan.upstream import fixes
from torchtitan.upstream.cpu_device import CpuDevice
from torchtitan.vision.spec import base_spec

_COLD = 3  # batches that are run first and thrown away


@dataclass(frozen=True)
class Way:
    """How a block learns."""

    name: str
    method: str = "timelyfreeze"
    is_frozen: bool = False  # all linear weights
    rank: int = 0  # of the gradients that frozen weights still get


def ways(ranks: list[int]) -> list[Way]:
    """Return what is compared, exact first."""
    frozen = [Way(f"rank {rank}", is_frozen=True, rank=rank) for rank in ranks]
    return [Way("exact"), *frozen, Way("nothing", is_frozen=True), Way("LoRA", LORA)]


class Block:
    """The first block of a model in a stage of its own, as the product builds and runs stages."""

    def __init__(self, model: str, way: Way, rows: int, tokens: int, dtype: str) -> None:
        config: JobConfig = job_config_class()()
        config.model.name, config.model.flavor = "llama3", model
        config.training.local_batch_size, config.training.seq_len = rows, tokens
        config.training.mixed_precision_param = dtype
        config.parallelism.pipeline_parallel_microbatch_size = rows
        config.activation_checkpoint.mode = "none"
        config.freezing = replace(config.freezing, method=way.method, gradient_rank=way.rank)
        spec = build_train_spec(base_spec(config), config)
        args: Any = spec.model_args[model]
        args.update_from_config(config)
        bench = Bench(config, spec, args, Repeats((), 0, 0), (False,), lambda response: None)
        self._lone = bench.build(["layers.0"], n_microbatches=3)
        named = self._lone.stage.named_stage_parameters()
        self._mask = np.array([way.is_frozen and p.ndim == 2 for _, p in named])
        self.n_tokens = rows * tokens
        # As upstream counts: weights, and the whole square of the attention.
        n_weights = sum(p.numel() for _, p in named if p.ndim == 2)
        self.flops = self.n_tokens * (6 * n_weights + 12 * args.dim * tokens)

    def times_ms(self) -> tuple[float, float]:
        """Run a batch; return what forward and backward of the measured microbatch took."""
        self._lone.run(self._mask, split=False)
        (times,) = self._lone.take_times()
        return times[ActionKind.FORWARD], times[ActionKind.FULL_BACKWARD]

    def watch(self, watched: Callable[[int], AbstractContextManager[Any]]) -> None:
        """Run a batch, each action of a microbatch in what ``watched`` returns for it."""
        stage = self._lone.stage

        def within(run: Callable[..., Any]) -> Callable[..., Any]:
            def action(microbatch: int, *args: Any, **kwargs: Any) -> Any:
                with watched(microbatch):
                    return run(microbatch, *args, **kwargs)

            return action

        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, within(getattr(type(stage), name).__get__(stage)))
        self.times_ms()
        del stage.forward_one_chunk, stage.backward_one_chunk

    def kernels(self) -> tuple[int, float]:
        """Return how many kernels the measured microbatch runs, and their ms, NaN on a CPU."""
        operations, profiles = Operations(), list[Any]()

        def watched(microbatch: int) -> AbstractContextManager[Any]:
            if microbatch != self._lone.measured:
                return nullcontext()
            if titan_tools.device_type != "cuda":
                return operations
            torch.cuda.synchronize()
            profiles.append(torch.profiler.profile())  # waits for the device when it ends
            return profiles[-1]

        self.watch(watched)
        if not profiles:
            return operations.n, float("nan")
        cuda = torch.autograd.DeviceType.CUDA
        seen = [e for profile in profiles for e in profile.events() if e.device_type == cuda]
        return len(seen), sum(e.time_range.elapsed_us() for e in seen) / 1e3

    def saved_bytes(self) -> int:
        """Return the bytes that the measured microbatch alone keeps for its backward."""
        # The storages stay alive, so that no place is taken twice.
        saved: list[dict[int, torch.UntypedStorage]] = [{}, {}, {}]

        def hooks(microbatch: int) -> AbstractContextManager[Any]:
            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                saved[microbatch][storage.data_ptr()] = storage
                return tensor

            return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

        self.watch(hooks)
        return sum(s.nbytes() for place, s in saved[1].items() if place not in saved[0])


class Operations(TorchDispatchMode):
    """Counts operations that are no views, each of which is a kernel or more on a GPU."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and do it."""
        name = func._schema.name
        self.n += not (func.is_view or "empty" in name or name == "aten::_unsafe_view")
        return func(*args, **(kwargs or {}))


HEAD = ["block, rows", "learns", "forward, ms", "backward, ms", "both, of exact's", "kernels, ms"]
HEAD += ["kernels", "saved, KB a token", "% of the peak"]


def measure(model: str, n_rows: int, options: argparse.Namespace) -> list[list[str]]:
    """Return a row for each way."""
    compared = ways(options.ranks)
    shape = n_rows, options.tokens, options.dtype
    blocks = [Block(model, way, *shape) for way in compared]
    times = [[block.times_ms() for block in blocks] for _ in range(_COLD + options.repeats)]
    columns = zip(*times[_COLD:], strict=True)
    medians = [[statistics.median(action) for action in zip(*c, strict=True)] for c in columns]
    peak = titan_tools.get_peak_flops(machine())
    rows = []
    for way, block, pair_ms in zip(compared, blocks, medians, strict=True):
        n_kernels, kernels_ms = block.kernels()
        kb, share = block.saved_bytes() / block.n_tokens / 1e3, blocks[0].flops / peak
        numbers = [*(f"{ms:.2f}" for ms in pair_ms), f"{sum(pair_ms) / sum(medians[0]):.2f}"]
        numbers += [f"{kernels_ms:.2f}", str(n_kernels), f"{kb:.1f}"]
        numbers.append(f"{1e5 * share / sum(pair_ms):.1f}")
        rows.append([f"{model}, {n_rows}", way.name, *numbers])
    return rows


def machine() -> str:
    """Return what the times were measured on."""
    device = torch.cuda if torch.cuda.is_available() else CpuDevice
    system = f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}"
    return f"{device.get_device_name()}, {system}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table of each model as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["Llama-3.2-1B", "Llama-3-8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--ranks", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    fixes.install()
    print(f"{machine()}; {options.tokens} tokens a row, {options.dtype}\n", flush=True)
    with quiet_process(job_config_class()()):
        for model, n_rows in product(options.models, options.rows):
            print(markdown_table(HEAD, measure(model, n_rows, options)), flush=True)


if __name__ == "__main__":
    main()
