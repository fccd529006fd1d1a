"""Spares tests most of the time that estimates of memory take: one model is counted once."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchtitan.freezing.memory import estimate


def _remembered(count: Callable[..., Any]) -> Callable[..., Any]:
    """``count``, for a model and values that it had before without counting again."""
    known: dict[Any, Any] = {}

    @functools.wraps(count)
    def counted(args: Any, **values: Any) -> Any:
        key = (repr(args), *sorted(values.items()))
        if key not in known:
            known[key] = count(args, **values)
        return known[key]

    return counted


@pytest.fixture(autouse=True, scope="session")
def _models_are_counted_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decoder_bytes", "block_bytes"):
            patch.setattr(estimate, name, _remembered(getattr(estimate, name)))
        yield
