"""Leaves out what imports lm-eval where slow tests are not wanted: that alone takes seconds."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the tests of the harness in a run of the unit tests."""
    unwanted = "not slow" in config.option.markexpr
    return True if unwanted and collection_path.name == "test_evaluation_harness.py" else None
