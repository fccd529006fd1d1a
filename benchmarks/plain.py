"""Compares freezing.method none with plain TorchTitan: tokens/s of two trainers in turns.

    torchrun --nproc_per_node=2 benchmarks/plain.py [--blocks N] [--steps N] [--key=value ...]

Both live in the same processes and take turns, a few steps each, so that whatever else the machine
does hits both. Keys go to both trainers. What freezing brings, `timelyfreeze compare run` measures.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from block_cost import machine
from torchtitan.protocols import train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from torchtitan.freezing.launch import prepare
from torchtitan.freezing.trainer import FreezingTrainer

_COLD = 7  # steps before the first turn


class Turns:
    """A trainer that runs a few steps at a time."""

    def __init__(self, trainer: Any, keys: Sequence[str]) -> None:
        config = prepare(keys)
        if trainer is Trainer:
            train_spec._extra_train_specs.clear()
        self._trainer = trainer(config)
        self._data = self._trainer.batch_generator(self._trainer.dataloader)
        self.step_ms: list[float] = []
        self.run(_COLD)
        self.step_ms.clear()

    def run(self, n_steps: int) -> float:
        """Run steps, which ranks begin together; return their median, milliseconds."""
        dist.barrier()
        for _ in range(n_steps):
            started = time.perf_counter()
            self._trainer.step += 1
            self._trainer.train_step(self._data)
            self.step_ms.append(1e3 * (time.perf_counter() - started))
        return statistics.median(self.step_ms[-n_steps:])


def main(arguments: Sequence[str]) -> None:
    """Let both take turns; rank 0 prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help="turns of each trainer")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    options, keys = parser.parse_known_args(arguments)
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        # A data set and a flavor that upstream has too.
        common = [
            "--job.config_file=train_configs/tiny_8m.toml", f"--job.dump_folder={folder}",
            "--model.flavor=debugmodel", "--training.dataset=c4_test",
            "--training.dataset_path=tests/assets/c4_test", "--training.steps=10000",
            "--metrics.log_freq=1000000", "--freezing.method=none",
            f"--parallelism.pipeline_parallel_degree={os.environ['WORLD_SIZE']}", *keys,
        ]  # fmt: skip
        # Ours puts its own parts in upstream's places.
        plain, ours = Turns(Trainer, common), Turns(FreezingTrainer, common)
        steps = options.steps
        ratios = [plain.run(steps) / ours.run(steps) for _ in range(options.blocks)]
    if dist.get_rank() == 0:
        medians = [statistics.median(each.step_ms) for each in (plain, ours)]
        print(
            f"{machine()}: plain {medians[0]:.1f} ms a step, method none {medians[1]:.1f}; "
            f"tokens/s over plain's {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
