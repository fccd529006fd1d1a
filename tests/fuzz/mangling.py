"""Broken inputs: bytes that were cut or flipped, and JSON with something else in one place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_NUMBERS = [0, -1, 2, 10**6, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
_TEXTS = ["", "0", "-1", "nan", "0F0", "..", "\x00", "\ud800", "ä" * 40, "9" * 5000]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(_TEXTS),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
# Deeper than any parser that calls itself can go.
DEEP = "[" * 200_000


def fuzzed(n_examples: int) -> settings:
    """Return settings for ``n_examples``, or as many times more as the chosen profile has."""
    return settings(
        max_examples=max(1, n_examples * settings.default.max_examples // 100),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def message_of(
    call: Callable[[], object],
    refusals: tuple[type[BaseException], ...] = (ValueError,),
) -> str | None:
    """Return what is said of an input that is refused, None where it is taken.

    Anything else that is raised is a defect, and so is a message that is longer than anyone would
    read.
    """
    try:
        call()
        message = None
    except refusals as error:
        message = str(error)
    if message is not None:
        assert message
        assert len(message) < 2000
    return message


@st.composite
def mangled_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw ``whole`` with an end missing, bits flipped, or bytes written over, put in or lost."""
    data = bytearray(whole)
    way = draw(st.sampled_from(["cut", "flip", "write", "insert", "remove", "all"]))
    if way == "all":
        return draw(st.binary(max_size=64))
    if way == "cut":
        return bytes(data[: draw(st.integers(0, len(data)))])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        if way == "flip":
            data[place : place + 1] = bytes(
                byte ^ (1 << draw(st.integers(0, 7))) for byte in data[place : place + 1]
            )
        elif way == "write":
            data[place : place + 8] = draw(st.binary(min_size=1, max_size=8))
        elif way == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=8))
        else:
            del data[place : place + draw(st.integers(1, 8))]
    return bytes(data)


@st.composite
def mangled_json(draw: st.DrawFn, whole: Any) -> str:
    """Draw the text of ``whole`` with one of its places changed, lost or doubled in another key."""
    data = copy.deepcopy(whole)
    places = list(_places(data))
    holder, key = draw(st.sampled_from(places))
    way = draw(st.sampled_from(["change", "change", "remove", "add", "replace all"]))
    if way == "replace all":
        data = draw(VALUES)
    elif way == "remove":
        del holder[key]
    elif way == "add" and isinstance(holder, dict):
        holder[draw(st.text(max_size=6) | st.sampled_from(_TEXTS))] = holder[key]
    else:
        holder[key] = draw(VALUES)
    return json.dumps(data)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key or index) below ``value``."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
