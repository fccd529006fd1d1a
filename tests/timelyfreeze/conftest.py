"""What all tests of the library share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


class HereAtOnce:
    """In the place of a process of its own, for tests that are not about it."""

    done = True

    def __init__(self, function: Callable[..., Any], **arguments: Any) -> None:
        self._call = partial(function, **arguments)

    def result(self, timeout_s: float | None = None) -> Any:
        return self._call()

    def cancel(self) -> None:
        """Nothing runs."""

    def __enter__(self) -> "HereAtOnce":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""


@pytest.fixture(autouse=True)
def _solved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for the process that solves while training waits, but for those of it."""
    monkeypatch.setattr("timelyfreeze.control.plans.solver_job.AwaitedCall", HereAtOnce)
