"""Runs shared by the tests of this folder: one torchrun for each number of processes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(1800))
