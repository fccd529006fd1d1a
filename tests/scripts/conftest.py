"""Scripts import their helpers as they do when started: from their own folder."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/multiprocess")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what imports lm-eval where slow tests are not wanted: that alone takes seconds."""
    unwanted = "not slow" in config.option.markexpr
    return True if unwanted and collection_path.name == "test_evaluation_harness.py" else None
