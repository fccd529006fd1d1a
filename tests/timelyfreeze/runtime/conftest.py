"""What the tests of stages share."""

from collections.abc import Iterator

import pytest

from tests.timelyfreeze.helpers.stages import process_group


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for all tests of a file."""
    with process_group():
        yield
