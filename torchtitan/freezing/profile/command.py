"""``timelyfreeze profile``: stages of a configuration, timed alone on this device.

So a pipeline can be planned for other devices; see docs/plan.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timelyfreeze.files import make_new, markdown_lines, markdown_table, write_whole
from timelyfreeze.files.options import new_folder, number, parse_with_keys, status_of, whole

DEFAULT_RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def main(arguments: Sequence[str]) -> int:
    """Profile the configuration in ``arguments``, save the files and return the exit status."""
    options, keys = parse_with_keys(_parser(), arguments)
    return status_of(lambda: _profile(options, keys))


def _profile(options: argparse.Namespace, keys: Sequence[str]) -> int:
    # Imported late: --help need not wait for torch. Patches come before the modules they patch.
    from torchtitan.upstream import fixes as upstream_fixes

    upstream_fixes.install()
    from timelyfreeze.schedule import order_to_csv
    from torchtitan.freezing.launch import read_config
    from torchtitan.freezing.partition.cut import partition_line
    from torchtitan.freezing.profile.bench import Repeats, Response
    from torchtitan.freezing.profile.profile import (
        HEADING,
        bounds_text,
        profile_overheads,
        profile_stages,
        response_text,
        table_rows,
    )

    def show(response: Response) -> None:
        _, _, *rows = markdown_lines(HEADING, table_rows(response))
        print(*rows, sep="\n", flush=True)

    ratios = tuple(sorted({0.0, 1.0, *options.ratios}))
    repeats = Repeats(ratios, options.warmup, options.repeats)
    job_config = read_config([f"--job.config_file={options.config}", *keys])
    about = _about(job_config)
    lines = [about["what"], *([told] if (told := partition_line(job_config)) else [])]
    print("\n".join([*lines, "", markdown_table(HEADING, [])]), flush=True)
    profile = profile_stages(job_config, repeats, show)
    overheads = None
    try:
        overheads = profile_overheads(profile)
    except ValueError as error:  # what was measured is worth keeping all the same
        print(f"warning: what a layer takes is left out: {error}", file=sys.stderr)
    name = f"{job_config.model.flavor}_{job_config.parallelism.pipeline_parallel_schedule}"
    texts = {
        "bounds.json": bounds_text(profile, job_config, overheads),
        "schedule.csv": order_to_csv(profile.order),
        "response.json": response_text(profile, repeats, about),
        "settings.json": json.dumps(job_config.to_dict(), indent=2) + "\n",
    }
    folder = options.output or make_new(Path("outputs/profiles"), name)
    for file, text in texts.items():
        write_whole(folder / file, text.encode())
    print(f"\nSaved in {folder}. Plan from it:\n  timelyfreeze plan {folder}/bounds.json")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze profile",
        usage="%(prog)s CONFIG.toml [options] [--section.key=value ...]",
        description="Times each stage of a configuration alone on this device. Keys of the "
        "configuration win over the file.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("--output", type=new_folder, metavar="FOLDER", help="where the files go")
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=number(0.0, 1.0),
        default=DEFAULT_RATIOS,
        metavar="R",
        help="freeze ratios to measure; 0 and 1 always are",
    )
    add = parser.add_argument
    add("--warmup", type=whole(0), default=3, help="rounds thrown away (%(default)s)")
    add("--repeats", type=whole(1), default=10, help="rounds that count (%(default)s)")
    return parser


def _about(job_config: Any) -> dict[str, str]:
    """Return the facts on a profile, above its table and in its file."""
    from datetime import datetime

    import torch
    import torchtitan.tools.utils as titan_tools

    from timelyfreeze.timing import usable_cores
    from torchtitan.settings import pipeline_title

    device = titan_tools.device_module.get_device_name(titan_tools.device_module.current_device())
    if titan_tools.device_type == "cpu":
        device = f"{device}, {usable_cores():g} cores"
    return {
        "config_file": job_config.job.config_file,
        "model": f"{job_config.model.name} {job_config.model.flavor}",
        "what": f"{pipeline_title(job_config)}; {device}; medians in milliseconds",
        "device": str(device),
        "torch_version": torch.__version__,
        "measured_at": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
