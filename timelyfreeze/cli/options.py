"""Options of scripts: an error is told with option, value and rule, before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from timelyfreeze.files import shown, write_obstacle

# Four times the largest pipeline that has been solved, 64 ranks and 256 microbatches.
MOST_CELLS = 65536


def status_of(work: Callable[[], int]) -> int:
    """Return the exit status of ``work``: 2, and its message, where the user made an error."""
    try:
        return work()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def require(option: str, value: float, least: float, most: float, *, above: bool = False) -> None:
    """Raise unless a number keeps to its limits.

    Args:
        option: Its name.
        value: What was given.
        least: Smallest allowed.
        most: Largest allowed.
        above: Whether ``least`` itself is too small.

    Raises:
        ValueError: Naming the three.
    """
    if not (least < value if above else least <= value) or not value <= most:
        low = f"above {least:g}" if above else f"{least:g} or more"
        raise ValueError(f"{option} is {value}; it must be {low} and at most {most:g}")


def require_word(option: str, word: str, known: Iterable[str]) -> None:
    """Raise unless ``word`` is among the known ones.

    Raises:
        ValueError: If it is not.
    """
    known = list(known)
    if word not in known:
        raise ValueError(f"{option} has {shown(word)}; known: {', '.join(known)}")


def require_pipeline(schedule: str, n_ranks: int, n_microbatches: int, options: str) -> None:
    """Raise unless there can be such a pipeline, and its program can be solved.

    Args:
        schedule: Its name.
        n_ranks: Pipeline ranks.
        n_microbatches: Microbatches of a batch.
        options: Which options say so, for the message.

    Raises:
        ValueError: If not.
    """
    # Imported late: it loads torch, which most scripts do without.
    from timelyfreeze.runtime import known_schedules, stages_per_rank

    names = [name for name in known_schedules() if stages_per_rank(name) is not None]
    require_word(options.split(",")[0], schedule, names)
    cells = n_ranks * n_microbatches
    if n_ranks < 1 or n_microbatches < 1 or cells > MOST_CELLS:
        raise ValueError(
            f"{options}: {n_ranks} ranks and {n_microbatches} microbatches; each must be 1 or "
            f"more, and their product at most {MOST_CELLS}"
        )


def require_file(option: str, path: Path) -> None:
    """Raise unless there is such a file.

    Raises:
        ValueError: If there is none.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{option} is {shown(str(path))}, which is no file")


def require_place(option: str, path: Path, *, is_folder: bool) -> None:
    """Raise where results could not be written; better now than after hours.

    Args:
        option: Its name.
        path: A folder that may have to be made yet, or a file in a folder that is there.
        is_folder: Which of them.

    Raises:
        ValueError: If nothing can be written there.
    """
    name = f"{option} is {shown(str(path))}"
    if not is_folder and (os.path.isdir(path) or not os.path.isdir(path.parent)):
        raise ValueError(f"{name}; it must be a file in a folder that is there")
    obstacle = write_obstacle(path if is_folder else path.parent)
    if obstacle is not None:
        raise ValueError(f"{name}, and {obstacle}")
