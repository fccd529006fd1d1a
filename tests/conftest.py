"""What all tests share."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.torchtitan.helpers import quick_parser
from timelyfreeze.cli import overlay
from timelyfreeze.planning import STOP_SIGNALS

overlay.install()
quick_parser.remember_sources()

# A machine that others use as well may take any time for an example. CI tries the same ones each
# time, so that it fails for what a change has done; who works here tries others.
settings.register_profile(
    "timelyfreeze", deadline=None, max_examples=20, derandomize="CI" in os.environ
)
# A hundred times the examples, see docs/faults.md; `scripts/test.sh all` takes it.
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "timelyfreeze"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow ones, so that none is left for one core alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _no_train_spec_stays() -> Iterator[None]:
    """Forget what a launch in this process has registered, so that no other test starts from it."""
    yield
    specs = sys.modules.get("torchtitan.protocols.train_spec")
    if specs is not None:
        specs._extra_train_specs.clear()


@pytest.fixture
def heeded() -> Iterator[None]:
    """Heed all signals to stop, also where the tests were started to ignore some (nohup, &)."""
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for all tests of a file."""
    from tests.timelyfreeze.helpers.stages import process_group

    with process_group():
        yield
