"""Values in and out of JSON by type hints; broken files are a ValueError.

A type hint allows values: a dataclass or NamedTuple (an object), a mapping, tuples and lists, an
enum (its value), a class with ``parse`` (its text), numbers, truth, text of one line, each with
None where the hint has it. ``Annotated`` adds a rule: ``Within(0, 1)``, ``OneOf("B", "W")``. Files
may come from anywhere: key, value and rule are named.

pydantic can do this too, but delays commands by 0.14 s and takes 10 MB.
"""

import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxdict = _SHORT.maxlist = 8
_SHORT.maxlevel = 3
_N_LISTED = 8
_LARGEST = sys.float_info.max

T = TypeVar("T")


def shown(value: Any) -> str:
    """Return ``value`` for a message: as Python writes it, shortened."""
    return _SHORT.repr(value)


def listed(names: Iterable[str]) -> str:
    """Return names as a message lists them: the first few, and of long ones the beginning."""
    names = list(names)
    rest = len(names) - _N_LISTED
    first = ", ".join(name[:100] for name in names[:_N_LISTED])
    # Half a character, which JSON can hold, cannot be written.
    first = first.encode(errors="backslashreplace").decode()
    return first + (f" and {rest} more" if rest > 0 else "")


def parse_json(text: str | bytes, of_object: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value of the JSON ``text``; ``of_object`` is what stands for each object.

    Raises:
        ValueError: If the text is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text, object_hook=of_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        OSError: If there is no such file.
        ValueError: For anything else, or texts impossible in a table; names the file.
    """
    try:
        value = parse_json(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path.name} holds half a character, \\ud800 to \\udfff") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is {type(value).__name__}; it must be an object")
    return value


# No step, byte or millisecond of a run has a larger number, and plots can be drawn up to here.
MOST = 1e15


@dataclass(frozen=True)
class Within:
    """A rule: numbers from ``low`` to ``high``; NaN and infinity where ``or_odd`` says so."""

    low: float
    high: float = math.inf
    or_odd: bool = False
    above: bool = False  # whether ``low`` itself is too small
    below: bool = False  # whether ``high`` itself is too large

    def error(self, value: float) -> str | None:
        """Return a value's error."""
        is_low = value <= self.low if self.above else value < self.low
        is_high = value >= self.high if self.below else value > self.high
        if not (is_low or is_high) and abs(value) <= _LARGEST:
            return None
        if self.or_odd and not math.isfinite(value):
            return None
        if self.low == -math.inf:
            return "it must be finite"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        if self.high == math.inf:
            is_of_floats = isinstance(self.low, float) and isinstance(value, float)
            return f"it must be {low}" + (" and finite" if is_of_floats else "")
        if self.high == MOST and not is_high:
            return f"it must be {low}"
        if not (self.above or self.below):
            return f"it must lie in [{self.low:g}, {self.high:g}]"
        power = isinstance(self.high, int) and self.high >= 2**31
        high = f"2**{int(self.high).bit_length() - 1}" if power else f"{self.high:g}"
        return f"it must be {low} and {'below' if self.below else 'at most'} {high}"


class OneOf:
    """A rule: a choice of words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def error(self, value: str) -> str | None:
        """Return a value's error."""
        return None if value in self._words else f"known: {', '.join(self._words)}"


# Beside a rule: no file may be without the field, even where it has a default.
WRITTEN = "written"

Count = Annotated[int, Within(0, MOST)]
Number = Annotated[int, Within(1, MOST)]
Milliseconds = Annotated[float, Within(0.0, MOST)]
Fraction = Annotated[float, Within(0.0, 1.0)]

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text of one line",
}


def broken_rule(hint: Any, value: Any) -> str | None:
    """Return the broken rule of a value's type, None if there is none."""
    if get_origin(hint) is Annotated:
        rule: Within | OneOf = get_args(hint)[1]
        return rule.error(value)
    is_optional = get_origin(hint) in (Union, UnionType) and value is not None
    rules = (broken_rule(kind, value) for kind in get_args(hint)) if is_optional else ()
    return next(filter(None, rules), None)


def to_plain(value: Any) -> Any:
    """Return a value as plain data for JSON; undone by :func:`read_as`."""
    if hasattr(value, "parse"):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if _has_fields(type(value)):
        return {name: to_plain(getattr(value, name)) for name in _fields(type(value))[0]}
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def json_lines(plain: Any, depth: int, indent: str = "") -> str:
    """Return plain data as JSON with a line per key, down to a depth."""
    if not (depth and plain and isinstance(plain, dict)):
        return json.dumps(plain)
    deeper = indent + "  "
    rows = [
        f"{deeper}{json.dumps(str(k))}: {json_lines(v, depth - 1, deeper)}"
        for k, v in plain.items()
    ]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def read_dataclass(kind: type[T], value: Any, where: str = "", *, partly: bool = False) -> T:
    """Build a dataclass from a JSON object; fields with a default may be missing.

    ``where`` is its key, for messages. Read ``partly``, unknown fields are left out, here and
    deeper; otherwise unknown and missing fields are a ValueError, and so are values refused by
    :func:`read_as`.
    """
    name, prefix = where or "the whole", f"{where}." if where else ""
    hints, required = _fields(kind)
    given = _object(name, value)
    if not partly and (unknown := sorted(given.keys() - hints.keys())):
        raise ValueError(f"{name} has unknown fields: {listed(unknown)}")
    read = {
        key: read_as(hints[key], item, prefix + key, partly=partly)
        for key, item in given.items()
        if key in hints
    }
    if missing := [field for field in required if field not in read]:
        raise ValueError(f"{name} lacks {listed(missing)}")
    return kind(**read)


def _find_fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the hints of a dataclass and the names of required fields."""
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, tuple):
        defaults = set(kind._field_defaults)
    else:
        defaults = {f.name for f in fields(kind) if not f.default is f.default_factory is MISSING}
    return hints, [
        key for key, hint in hints.items() if key not in defaults or WRITTEN in get_args(hint)
    ]


_fields: Callable[[Any], tuple[dict[str, Any], list[str]]] = cache(_find_fields)


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_field_defaults")


def read_as(hint: Any, value: Any, where: str, *, partly: bool = False, more: str = "") -> Any:
    """Return a JSON value, read at ``where``, as its type hint.

    A number whose hint has no rule may be NaN or infinite, as a loss may be. ``more`` names further
    allowed values, for messages. ValueError for another type or a broken rule.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = read_as(inner[0], value, where, partly=partly, more=more)
        if error := inner[1].error(found):
            raise ValueError(f"{where} is {shown(value)}; {error}")
        return found
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{where} is {shown(value)}; it must be one of {listed(inner)}{more}")
        return value
    if origin in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not NoneType]
        if value is None and NoneType in inner:
            return None
        # Of several dataclasses the one that has all the fields.
        given = value if isinstance(value, dict) else {}
        fit = (k for k in kinds[1:] if _has_fields(k) and given.keys() == _fields(k)[0].keys())
        more = " or null" if NoneType in inner else ""
        return read_as(next(fit, kinds[0]), value, where, partly=partly, more=more)
    if origin is tuple or origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {shown(value)}; it must be a list{more}")
        kinds = list(inner) if origin is tuple and inner[-1] is not ... else [inner[0]] * len(value)
        if len(value) != len(kinds):
            raise ValueError(f"{where} is {shown(value)}; it must be a list of {len(kinds)}")
        places = enumerate(zip(kinds, value, strict=True))
        return origin(read_as(k, v, f"{where}[{i}]", partly=partly) for i, (k, v) in places)
    if origin is Mapping or origin is dict:
        return {
            _key(inner[0], key, where): read_as(inner[1], item, f"{where}.{key}", partly=partly)
            for key, item in _object(where, value, more).items()
        }
    if _has_fields(hint) and not hasattr(hint, "parse"):
        return read_dataclass(hint, _object(where, value, more), where, partly=partly)
    return value if hint is Any else _scalar(hint, value, where, more)


def _scalar(kind: Any, value: Any, where: str, more: str) -> Any:
    if hasattr(kind, "parse"):
        try:
            return kind.parse(_scalar(str, value, where, more))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if issubclass(kind, Enum):
        if value not in (known := [one.value for one in kind]):
            raise ValueError(f"{where} is {shown(value)}; known: {', '.join(known)}")
        return kind(value)
    if kind is str:
        # Half characters cannot be written, and tables have a line for each run.
        fits = isinstance(value, str) and value.isprintable()
    else:
        is_number = isinstance(value, int if kind is int else int | float)
        is_number = is_number and not isinstance(value, bool)
        fits = isinstance(value, bool) if kind is bool else is_number
        fits = fits and not (isinstance(value, int) and abs(value) > _LARGEST)
    if not fits:
        raise ValueError(f"{where} is {shown(value)}; it must be {_WORDS[kind]}{more}")
    return kind(value)


def _key(kind: Any, key: str, where: str) -> Any:
    if kind is not int:
        return read_as(kind, key, f"a key of {where}") if kind is not str else key
    if not (key.isdecimal() and len(key) < 10):
        raise ValueError(f"a key of {where} is {shown(key)}; it must be a whole number")
    return int(key)


def _object(where: str, value: Any, more: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object{more}")
    return value


def table_values(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a configuration's table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from table_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
