"""What the tests of profiles share."""

import pytest

from torchtitan.upstream import fixes as upstream_fixes


@pytest.fixture(scope="module")
def installed() -> None:
    upstream_fixes.install()
