from collections.abc import Iterator

import pytest

from tests.timelyfreeze.helpers.cached_run import Run


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.cache.close()
