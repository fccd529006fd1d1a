"""JSON from files that anyone may have written: every way in which it is broken is a ValueError."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = _SHORT.maxlist = 8
_SHORT.maxlevel = 3
_N_LISTED = 8
_LARGEST = sys.float_info.max

T = TypeVar("T")


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


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: If there is no such file.
        ValueError: If it holds anything else, or texts that no table can hold; names the file.
    """
    try:
        value = parse_json(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be written
    except UnicodeEncodeError:
        raise ValueError(f"{path.name} holds half a character, \\ud800 to \\udfff") from None
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is {type(value).__name__}; it must be an object")
    return value


def read_dataclass(kind: type[T], values: Any, where: str = "") -> T:
    """Build a dataclass from an object that was read from JSON.

    Its fields may be texts, numbers, dataclasses, objects and lists (``tuple[T, ...]``) of these,
    and None where they allow it.
    A number may be NaN or infinite, as a loss may be.

    Args:
        kind: The dataclass. Fields with a default may be missing in ``values``.
        values: The object.
        where: Its key, for messages; empty for the whole.

    Raises:
        ValueError: If a value is of another type, a field is unknown, or one is missing.
    """
    name = where or "the whole"
    hints = get_type_hints(kind)
    if unknown := sorted(set(keys_of(name, values)) - hints.keys()):
        raise ValueError(f"{name} has unknown fields: {listed(unknown)}")
    prefix = f"{where}." if where else ""
    read = {key: _read_as(hints[key], value, prefix + key) for key, value in values.items()}
    missing = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.name not in read and field.default is field.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{name} lacks {listed(missing)}")
    return kind(**read)


def _read_as(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is tuple:
        items = enumerate(list_of(where, value))
        return tuple(_read_as(get_args(hint)[0], one, f"{where}[{i}]") for i, one in items)
    kinds = get_args(hint) if get_origin(hint) is not Mapping else ()
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0] if kinds else hint
    if is_dataclass(kind):
        return read_dataclass(kind, value, where)  # type: ignore[arg-type]
    inner = get_args(kind)[1:] if get_origin(kind) is Mapping else ()
    if inner and get_origin(inner[0]) is Mapping:
        number = get_args(inner[0])[1]
        return {
            key: {
                name: _read_as(number, value[key][name], f"{where}.{key}.{name}")
                for name in keys_of(f"{where}.{key}", value[key])
            }
            for key in keys_of(where, value)
        }
    if inner and is_dataclass(inner[0]):
        return {
            key: _read_as(inner[0], value[key], f"{where}.{key}") for key in keys_of(where, value)
        }
    words, fits = _FORMS[kind]
    if not fits(value):
        words += " or null" if type(None) in kinds else ""
        raise ValueError(f"{where} is {shown(value)}; it must be {words}")
    return {int(key): item for key, item in value.items()} if kind == Mapping[int, float] else value


def _is_line(value: Any) -> bool:
    # Half characters cannot be written, and tables have a line for each run.
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST


def _is_whole(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _object_of(
    fits: Callable[[Any], bool], by: Callable[[str], bool] = bool
) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(by(key) and fits(item) for key, item in value.items())
    )


# How a type is called in messages, and what fits it.
_FORMS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text of one line", _is_line),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    Mapping[str, str]: ("an object of texts", _object_of(_is_line)),
    Mapping[str, float]: ("an object of numbers", _object_of(_is_number)),
    Mapping[str, Mapping[str, float]]: ("an object", lambda value: isinstance(value, dict)),
    Mapping[int, float]: ("an object of numbers by stage", _object_of(_is_number, str.isdecimal)),
}


def field_of(where: str, holder: Any, key: str) -> Any:
    """Return the entry ``key`` of an object from JSON, itself under ``where``; "" for the whole.

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
    """Return a number that was read from JSON at ``where``, as a float.

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
