"""Options of commands: an error is told with option, value and rule, before anything starts.

``type=`` of an argparse option takes what ``number``, ``word`` and the functions below return;
argparse puts the option's name in front of what they say.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from timelyfreeze.files import printable, shown, write_obstacle


def status_of(work: Callable[[], int]) -> int:
    """Return the exit status of ``work``: 2, and its message, where the user made an error."""
    try:
        return work()
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2


def parse_with_keys(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and keys of the configuration: ``--section.key``, all behind ``--``."""
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    options, keys = parser.parse_known_args(words[:split])
    flags = [word.partition("=")[0] for word in keys if word.startswith("--")]
    if keys and not (keys[0].startswith("--") and all("." in flag for flag in flags)):
        parser.error(f"unrecognized arguments: {' '.join(keys)}")
    return options, [*keys, *words[split + 1 :]]


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
            raise wrong(text, f"must be a whole number, {_range(low, high, False)}")
        return int(text)

    return parse


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Return the type of an option that takes a number; ``above`` leaves out ``low`` itself."""

    def parse(text: str) -> float:
        try:
            require("it", float(text), low, high, above=above)
        except ValueError:
            raise wrong(text, f"must be a number, {_range(low, high, above)}") from None
        return float(text)

    return parse


def existing_file(text: str) -> Path:
    """Return the path of a file that is there; the type of an option."""
    if not os.path.isfile(text):
        raise wrong(text, "must be a file")
    return Path(text)


def words(text: str) -> list[str]:
    """Return the words of a text as a shell would; the type of an option."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is given: {error}") from None


def new_file(text: str) -> Path:
    """Return a path at which a file can be written; better known now than after hours."""
    path = Path(text)
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise wrong(text, "must be a file in a folder that is there")
    return _writable(text, path, path.parent)


def new_folder(text: str) -> Path:
    """Return the path of a folder that is there or can be made, and written to."""
    return _writable(text, Path(text), Path(text))


def _writable(text: str, path: Path, folder: Path) -> Path:
    obstacle = write_obstacle(folder)
    if obstacle is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {obstacle}")
    return path


def wrong(text: str, rule: str) -> argparse.ArgumentTypeError:
    """Return the error of a type: what was given, and the rule."""
    return argparse.ArgumentTypeError(f"{shown(text)} is given; it {rule}")
