"""What two parts of a run had of a cache, by hand."""

import pytest

from timelyfreeze.front.caching import CacheUse, use_of_parts


def test_counts_add_up_and_what_is_kept_is_what_is_kept_now() -> None:
    former = CacheUse(10, 4, 300, 200, 5.0, 80.0, 3)
    latest = CacheUse(6, 2, 50, 0, 1.5, 20.0, 4)
    assert use_of_parts(former, latest) == CacheUse(16, 6, 50, 0, 6.5, 100.0, 7)


@pytest.mark.parametrize(
    ("former_ms", "latest_ms", "saved_ms"), [(None, 2.0, 2.0), (2.0, None, 2.0), (None, None, None)]
)
def test_what_is_known_of_a_saving_counts(
    former_ms: float | None, latest_ms: float | None, saved_ms: float | None
) -> None:
    parts = [CacheUse(1, 1, 0, 0, 0.0, saved) for saved in (former_ms, latest_ms)]
    together = use_of_parts(*parts)
    assert together is not None
    assert together.saved_ms == saved_ms


def test_a_part_alone() -> None:
    part = CacheUse(1, 1, 0, 0, 0.0, None)
    assert use_of_parts(None, part) == use_of_parts(part, None) == part
    assert use_of_parts(None, None) is None
