"""``timelyfreeze estimate``: predicted memory of all ranks. Needs no GPU and no launch."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from timelyfreeze.files import markdown_table
from timelyfreeze.files.options import number, parse_with_keys, status_of
from timelyfreeze.settings import GIB


def main(arguments: Sequence[str]) -> int:
    """Print a table per schedule and return the exit status."""
    options, keys = parse_with_keys(_parser(), arguments)
    return status_of(lambda: _estimate(options, keys))


def _estimate(options: argparse.Namespace, keys: Sequence[str]) -> int:
    # Imported late: --help need not wait for torch.
    from torchtitan.freezing.launch import read_config
    from torchtitan.freezing.memory.estimate import estimate_memory
    from torchtitan.freezing.partition.cut import partition_line
    from torchtitan.freezing.values.pipeline import compiles_blocks
    from torchtitan.settings import pipeline_title

    all_fit = True
    for schedule in options.schedules or [None]:
        chosen = [f"--parallelism.pipeline_parallel_schedule={schedule}"] if schedule else []
        job_config = read_config([f"--job.config_file={options.config}", *keys, *chosen])
        ranks = estimate_memory(job_config)
        print(pipeline_title(job_config))
        if (told := partition_line(job_config)) is not None:
            print(told)
        if compiles_blocks(job_config):
            print("Activations are those of eager blocks: compiled ones keep less of them.")
        emulated = job_config.emulation.enable
        names = ["all ranks"] if emulated else [f"rank {rank}" for rank in range(len(ranks))]
        print(render(ranks, names))
        for size in options.device_gib:
            pairs = zip(names, ranks, strict=True)
            crowded = [name for name, memory in pairs if not memory.fits(size * GIB)]
            all_fit = all_fit and not crowded
            verdict = f"too small for {', '.join(crowded)}" if crowded else "fits"
            print(f"{size:g} GiB a device: {verdict}")
        print()
    return 0 if all_fit else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze estimate",
        usage="%(prog)s CONFIG.toml [--schedules GPipe 1F1B ...] [--device-gib 48 140 ...] "
        "[--section.key=value ...]",
        description="Says what each rank's memory will hold, and whether it fits. A rank fits if 2 "
        "GiB are left over, for the device's context, communication and fragments. Keys of "
        "the configuration win over the file. The exit status is 1 if something does not fit a "
        "size that was asked for.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "--schedules", nargs="+", help="to try one after the other; that of CONFIG if not given"
    )
    parser.add_argument(
        "--device-gib",
        nargs="+",
        type=number(0.0, 1e6, above=True),
        default=[],
        help="memory of a device, GiB",
    )
    return parser


def render(ranks: Sequence[Any], names: Sequence[str]) -> str:
    """Return a markdown table, a row per device, in GiB."""
    parts = [field.name for field in fields(ranks[0])]
    return markdown_table(
        ["GiB", *parts, "total"],
        (
            [name, *(f"{getattr(memory, part) / GIB:.2f}" for part in [*parts, "total"])]
            for name, memory in zip(names, ranks, strict=True)
        ),
    )
