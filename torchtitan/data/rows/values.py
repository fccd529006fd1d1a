"""Values of rows: said once, and not null."""

from __future__ import annotations

import json
from typing import Any


def parse_value(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: If it is none, or an object has a key twice.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_said_once)


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def without_nulls(value: Any) -> Any:
    """Return a value whose objects have no nulls.

    Columnar files give every object each key that one of them has in any row.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
