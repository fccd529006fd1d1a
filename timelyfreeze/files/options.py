"""Options of commands: errors name option, value and rule, before anything starts.

``type=`` of an argparse option takes the values of ``number``, ``word`` and the functions below;
argparse puts the option's name in front of their message.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from timelyfreeze.files import Within, printable, shown, write_obstacle

T = TypeVar("T", int, float)


def status_of(work: Callable[[], int]) -> int:
    """Return the exit status of ``work``: 2, and its message, where the user made an error."""
    try:
        return work()
    except BrokenPipeError:
        raise  # of nobody's error
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


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return the option type of whole numbers from ``low`` to ``high``."""
    return _within(int, "whole number", low, high)


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """Return the option type of numbers; ``above`` excludes ``low``."""
    return _within(float, "number", low, high, above=above)


def _within(
    kind: type[T], name: str, low: float, high: float, *, above: bool = False
) -> Callable[[str], T]:
    least = f"above {low:g}" if above else f"{low:g} or more"

    def parse(text: str) -> T:
        with suppress(ValueError):
            value = kind(text)
            if Within(low, high, above=above).error(value) is None:
                return value
        raise wrong(text, f"must be a {name}, {least} and at most {high:g}")

    return parse


def existing_file(text: str) -> Path:
    """Return the path of an existing file; an option type."""
    if not os.path.isfile(text):
        raise wrong(text, "must be a file")
    return Path(text)


def run_folder(path: Path) -> Path:
    """Return a run's folder: ``path``, or the only run below; ValueError for several."""
    depths = () if (path / "settings.json").exists() else ("*", "*/*")
    runs = [file.parent for depth in depths for file in path.glob(f"{depth}/settings.json")]
    if len(runs) > 1:
        raise ValueError(f"{path} holds {len(runs)} runs; name one, such as the last, {max(runs)}")
    return runs[0] if runs else path


def words(text: str) -> list[str]:
    """Return the words of a text as a shell would; the type of an option."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is given: {error}") from None


def new_folder(text: str) -> Path:
    """Return the path of a writable folder, there or to be made."""
    obstacle = write_obstacle(Path(text))
    if obstacle is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: {obstacle}")
    return Path(text)


def wrong(text: str, rule: str) -> argparse.ArgumentTypeError:
    """Return the error of a type: the value, and the rule."""
    return argparse.ArgumentTypeError(f"{shown(text)} is given; it {rule}")
