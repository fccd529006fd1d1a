"""Options of commands: an error is told with option, value and rule, before anything starts.

``type=`` of an argparse option takes what ``number``, ``word`` and the functions below return;
argparse puts the option's name in front of what they say.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from timelyfreeze.files import shown, write_obstacle

# Four times the largest pipeline that has been solved, 64 ranks and 256 microbatches.
MAX_CELLS = 65536


def status_of(work: Callable[[], int]) -> int:
    """Return the exit status of ``work``: 2, and its message, where the user made an error."""
    try:
        return work()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def require(option: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raise unless a number keeps to its bounds.

    Args:
        option: Its name.
        value: What was given.
        low: Smallest allowed.
        high: Largest allowed.
        above: Whether ``low`` itself is too small.

    Raises:
        ValueError: Naming the three.
    """
    if not (low < value if above else low <= value) or not value <= high:
        raise ValueError(f"{option} is {value}; it must be {_range(low, high, above)}")


def _range(low: float, high: float, above: bool) -> str:
    return f"{f'above {low:g}' if above else f'{low:g} or more'} and at most {high:g}"


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isdecimal() and len(digits) < 30 and low <= int(text) <= high):
            raise _wrong(text, f"must be a whole number, {_range(low, high, False)}")
        return int(text)

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Return the type of an option that takes a number; ``above`` leaves out ``low`` itself."""

    def parse(text: str) -> float:
        try:
            require("it", float(text), low, high, above=above)
        except ValueError:
            raise _wrong(text, f"must be a number, {_range(low, high, above)}") from None
        return float(text)

    return parse


def schedule_name(text: str) -> str:
    """Return the name of a schedule that torch knows; the type of an option."""
    # Imported late: it loads torch, which --help does without.
    from timelyfreeze.runtime import known_schedules

    if text not in known_schedules():
        raise _wrong(text, f"must be one of {', '.join(known_schedules())}")
    return text


def existing_file(text: str) -> Path:
    """Return the path of a file that is there; the type of an option."""
    if not os.path.isfile(text):
        raise _wrong(text, "must be a file")
    return Path(text)


def new_file(text: str) -> Path:
    """Return a path at which a file can be written; better known now than after hours."""
    path = Path(text)
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise _wrong(text, "must be a file in a folder that is there")
    return _writable(text, path, path.parent)


def new_folder(text: str) -> Path:
    """Return the path of a folder that is there or can be made, and written to."""
    return _writable(text, Path(text), Path(text))


def _writable(text: str, path: Path, folder: Path) -> Path:
    try:
        obstacle = write_obstacle(folder)
    except OSError as error:  # a name that is too long, say
        obstacle = error.strerror
    if obstacle is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {obstacle}")
    return path


def _wrong(text: str, rule: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{shown(text)} is given; it {rule}")


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
    if n_ranks < 1 or n_microbatches < 1 or cells > MAX_CELLS:
        raise ValueError(
            f"{options}: {n_ranks} ranks and {n_microbatches} microbatches; each must be 1 or "
            f"more, and their product at most {MAX_CELLS}"
        )
