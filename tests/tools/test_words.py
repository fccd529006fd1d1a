"""Docstrings name their subjects."""

import pytest

from tests.tools.words import PACKAGES, ROOT, pointing_share, sources_of

LIMIT = 0.03


def test_pointing_words_are_few() -> None:
    sources = [source for package in PACKAGES for source in sources_of(ROOT / package)]
    assert len(sources) > 200
    assert pointing_share(sources) <= LIMIT


@pytest.mark.parametrize(
    ("source", "share"),
    [
        ('"""What it is."""\n', 2 / 3),
        ('def f():\n    """Return the limit of each class."""\n', 1 / 6),
        ('class A:\n    """A window."""\n    what = "what it that"  # which one\n', 0),
        ("what = it = 1\n", 0),
    ],
)
def test_words_of_docstrings_alone_count(source: str, share: float) -> None:
    assert pointing_share([source]) == pytest.approx(share)
