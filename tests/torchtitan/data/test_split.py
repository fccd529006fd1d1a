from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.data.split import ALL_ROWS, RowSplit, is_same_data_set, share_mistake

SHARES = st.floats(0.0, 0.95)


@given(n_rows=st.integers(20, 500), share=SHARES)
def test_the_two_parts_are_disjoint_and_complete(n_rows: int, share: float) -> None:
    trained = RowSplit(share).indices(n_rows).tolist()
    held_out = RowSplit(share, held_out=True).indices(n_rows).tolist()
    assert sorted(trained + held_out) == list(range(n_rows))
    assert trained == sorted(trained), "in the order of the data set"
    assert abs(len(held_out) - share * n_rows) <= 0.5


@given(n_rows=st.integers(20, 500), shares=st.tuples(SHARES, SHARES))
def test_a_smaller_share_lies_within_a_larger_one(n_rows: int, shares: tuple[float, float]) -> None:
    small, large = (RowSplit(s, held_out=True).indices(n_rows) for s in sorted(shares))
    assert set(small.tolist()) <= set(large.tolist())


def test_held_out_rows_are_always_the_same_and_from_everywhere() -> None:
    rows = RowSplit(0.25, held_out=True).indices(1000)
    assert rows.tolist() == RowSplit(0.25, held_out=True).indices(1000).tolist()
    # Each hundred rows has about 25: four standard deviations of the hypergeometric law are 16.
    per_hundred = np.bincount(rows // 100, minlength=10)
    assert per_hundred.min() >= 9
    assert per_hundred.max() <= 41
    # And so have the first hundred of them, which a short validation reads.
    assert np.bincount(rows[:100] // 500, minlength=2).min() >= 30


def test_without_a_share_everything_is_trained_on() -> None:
    assert ALL_ROWS.indices(4).tolist() == [0, 1, 2, 3]
    assert RowSplit(0.0, held_out=True).indices(4).tolist() == []
    assert ALL_ROWS.indices(4).dtype == np.int64


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    text = f"data.validation_share is {share}; it must lie in [0, 1)"
    assert share_mistake(share) == text
    with pytest.raises(ValueError, match=r"data\.validation_share is .*; it must lie in \[0, 1\)"):
        RowSplit(share)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.99])
def test_a_share_within_its_range_is_no_mistake(share: float) -> None:
    assert share_mistake(share) is None


@pytest.mark.parametrize("held_out", [True, False])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(held_out: bool) -> None:
    with pytest.raises(ValueError, match=r"validation_share is 0\.9, .* all of 4 rows"):
        RowSplit(0.9, held_out).indices(4)


def test_same_data_sets_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    assert is_same_data_set("alpaca", str(path), "ALPACA", f"{path}/../rows/")
    assert is_same_data_set("alpaca", str(path), "alpaca", str(tmp_path / "link"))
    assert is_same_data_set("sharegpt", None, "sharegpt", "teknium/OpenHermes-2.5")
    assert is_same_data_set("alpaca", "some/name", "alpaca", "some/name")


def test_other_data_sets_are_not_the_same(tmp_path: Path) -> None:
    assert not is_same_data_set("alpaca", str(tmp_path), "sharegpt", str(tmp_path))
    assert not is_same_data_set("alpaca", str(tmp_path), "alpaca", None)
    assert not is_same_data_set("alpaca", str(tmp_path), "alpaca", str(tmp_path / "other"))
    assert not is_same_data_set("c4_test", None, "c4_test", None), "no rows to hold out there"
