"""What ranks find together, by values made by hand."""

import pytest

from timelyfreeze.cli.doctor.group import clocks, meet, neighbours, ranks


def test_all_on_one_release() -> None:
    met = ranks([("a", "2.13.0"), ("a", "2.13.0"), ("b", "2.13.0")])
    assert (met.found, met.is_wrong) == ("3 met: 2 on a, 1 on b, with torch 2.13.0", False)
    mixed = ranks([("a", "2.13.0"), ("b", "2.12.0")])
    assert mixed.is_wrong
    assert mixed.found.endswith("with torch 2.12.0 and 2.13.0")


def test_clocks_that_are_apart() -> None:
    assert clocks([5.0, 5.02, 4.99]).found.startswith("at most 30 ms apart")
    assert not clocks([5.0, 5.02, 4.99]).is_wrong
    assert clocks([5.0, 7.0]).is_wrong


def test_a_slow_link_is_named() -> None:
    fast = neighbours([(0, 8.0), (1, 1.0)])
    assert not fast.is_wrong
    assert fast.found == "2 pairs; the slowest, ranks 1 and 2: 1.00 GB/s"
    assert neighbours([(0, 8.0), (1, 0.02)]).is_wrong
    assert not neighbours([]).is_wrong


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two waits a second; nobody is there."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = meet(1.0)
    assert found is not None
    assert found.found.startswith("rank 0 of 2 on ")
    assert "did not meet the others within 1 s" in found.found
