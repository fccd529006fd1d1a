"""Runs shared by the tests of this folder: one torchrun for each number of processes."""

import sys
from pathlib import Path

import pytest
import torch

# Tests take from helpers, and a few from one another.
sys.path.insert(0, str(Path(__file__).parent / "gradients"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from hybrids import Case, Runs
from method_runs import run_methods


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute what runs are compared with as their processes do: more threads add up otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hybrid_runs(request, tmp_path_factory):
    """The runs of ``hybrids.py`` that the chosen tests look at."""
    given = (getattr(item, "callspec", None) for item in request.session.items)
    values = (value for spec in given if spec for value in spec.params.values())
    chosen = dict.fromkeys(value for value in values if isinstance(value, Case))
    return Runs(chosen, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def method_runs(request, tmp_path_factory):
    """The runs of ``method_runs.py`` that the chosen tests look at."""
    given = [i.callspec.params for i in request.session.items if "method_runs" in i.fixturenames]
    return run_methods(tmp_path_factory.mktemp("methods"), given)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(1800))
