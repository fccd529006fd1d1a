"""Where the trainer is a stand-in, its configuration need not be one that could be trained with."""

from collections.abc import Sequence

import pytest

from timelyfreeze.compare.runs import jobs


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sequence[Sequence[str]]]]:
    """Finds no errors, and tells what was to be checked: module and command lines."""
    asked: list[tuple[str, Sequence[Sequence[str]]]] = []

    def errors_of(module: str, lines: Sequence[Sequence[str]], *_: object) -> list[None]:
        asked.append((module, lines))
        return [None] * len(lines)

    monkeypatch.setattr(jobs, "errors_of", errors_of)
    return asked
