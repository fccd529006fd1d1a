"""What the tests of stages and of schedules share."""

import itertools
from collections.abc import Iterator

import pytest

from tests.timelyfreeze.helpers.stages import process_group

SIZES = list(itertools.product((2, 4), (8, 16)))


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}ranks{size[1]}microbatches")
def size(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(ranks, microbatches), with a process group of so many pretended ranks."""
    with process_group("fake", world_size=request.param[0]):
        yield request.param
