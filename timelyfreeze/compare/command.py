"""What commands that make runs and table them fraction: arguments, errors, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from timelyfreeze.compare.runs import FoundRuns, find_runs

TRAINERS = "--"


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return the options, and what follows ``--``: arguments of the trainer."""
    arguments = list(arguments)
    split = arguments.index(TRAINERS) if TRAINERS in arguments else len(arguments)
    return parser.parse_args(arguments[:split]), tuple(arguments[split + 1 :])


def refuse_trainer_arguments(arguments: Sequence[str]) -> None:
    """Raise where there are ``arguments`` for a trainer that will not be started.

    Raises:
        ValueError: If there are any.
    """
    if arguments:
        raise ValueError(f"{TRAINERS} {' '.join(arguments)}: table starts no trainer")


def find_any(folders: Sequence[Path]) -> FoundRuns:
    """Return the runs below ``folders``.

    Raises:
        ValueError: If there are none, or one of ``folders`` is no folder.
    """
    found = find_runs(folders)
    if not found.runs and not found.unreadable:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"no summary.json below {names}; a run writes it when it ends")
    return found


def keep(output: Path, files: Iterable[tuple[str, str | bytes]]) -> None:
    """Write ``files``, names and contents, to the folder ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        data = content.encode() if isinstance(content, str) else content
        (output / name).write_bytes(data)


def run_process(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run ``main`` as a process that goes on from where it was interrupted."""
    # Asked to end, it ends the run that is on its way as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")
