"""JSON from files that anyone may have written: every way in which it is broken is a ValueError."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Iterable
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = _SHORT.maxlist = 8
_SHORT.maxlevel = 3
_N_LISTED = 8
_LARGEST = sys.float_info.max


def shown(value: Any) -> str:
    """Return ``value`` as a message shows it: as Python writes it, long ones in part."""
    return _SHORT.repr(value)


def listed(names: Iterable[str]) -> str:
    """Return names as a message lists them: the first few, and of long ones the beginning."""
    names = list(names)
    rest = len(names) - _N_LISTED
    first = ", ".join(name[:60] for name in names[:_N_LISTED])
    # Half a character, which JSON can hold, cannot be written.
    first = first.encode(errors="backslashreplace").decode()
    return first + (f" and {rest} more" if rest > 0 else "")


def parse_json(text: str | bytes) -> Any:
    """Return what the JSON ``text`` holds.

    Raises:
        ValueError: If it is no JSON, no UTF-8, or nested deeper than can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def field_of(where: str, holder: Any, key: str) -> Any:
    """Return what an object that was read from JSON has under ``key``.

    Args:
        where: Key of the object, for messages; empty for the whole.
        holder: The object.
        key: Which of its entries.

    Raises:
        ValueError: If it is no object or has no such key.
    """
    if not isinstance(holder, dict):
        raise ValueError(f"{where or 'the whole'} is {shown(holder)}; it must be an object")
    if key not in holder:
        raise ValueError(f"{where + '.' if where else ''}{key} is missing")
    return holder[key]


def keys_of(where: str, value: Any) -> list[str]:
    """Return the keys of an object that was read from JSON.

    Raises:
        ValueError: If it is no object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object")
    return list(value)


def list_of(where: str, value: Any) -> list[Any]:
    """Return a list that was read from JSON.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} is {shown(value)}; it must be a list")
    return value


def whole_of(where: str, value: Any, *, least: int = 0, most: int = 10**9) -> int:
    """Return a whole number that was read from JSON.

    Raises:
        ValueError: If it is none, or outside of the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where} is {shown(value)}; it must be a whole number")
    if not least <= value <= most:
        raise ValueError(f"{where} is {shown(value)}; it must be {_range(least, most)}")
    return value


def truth_of(where: str, value: Any) -> bool:
    """Return true or false as it was read from JSON.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {shown(value)}; it must be true or false")
    return value


def number_of(where: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a number that was read from JSON, as a float.

    Args:
        where: File and key, for messages.
        value: What stands there.
        least: Smallest allowed.
        most: Largest allowed.

    Raises:
        ValueError: If it is no number, not finite, or outside of the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {shown(value)}; it must be a number")
    if not -_LARGEST <= value <= _LARGEST:  # NaN is not, and an int of any size can be compared
        raise ValueError(f"{where} is {shown(value)}; it must be finite")
    if not least <= value <= most:
        raise ValueError(f"{where} is {shown(value)}; it must be {_range(least, most)}")
    return float(value)


def _range(least: float, most: float) -> str:
    if most == math.inf:
        return "0 or more" if least == 0 else f"{least:g} or more"
    return f"{most:g} or less" if least == -math.inf else f"in [{least:g}, {most:g}]"
