"""What ranks find together, by values made by hand."""

import pytest

from timelyfreeze.cli.doctor.group import Round, clocks, meet, neighbours, ranks


def test_all_on_one_release() -> None:
    met = ranks([("a", "2.13.0"), ("a", "2.13.0"), ("b", "2.13.0")])
    assert (met.found, met.is_wrong) == ("3 met: 2 on a, 1 on b", False)
    mixed = ranks([("a", "2.13.0"), ("b", "2.12.0")])
    assert mixed.is_wrong
    assert mixed.found.endswith("with torch 2.12.0 and 2.13.0")


def rounds(ahead_ms: float, there_ms: float = 2.0, back_ms: float = 2.0) -> list[Round]:
    """Messages with a clock that is ahead of that of rank 0; the first one was held up."""
    found = []
    for start, held_up in ((0.0, 30.0), (100.0, 0.0)):
        got = start + there_ms + held_up
        found.append((start, got + ahead_ms, got + 1.0 + ahead_ms, got + 1.0 + back_ms))
    return found


@pytest.mark.parametrize("ahead_ms", [0.0, 900.0, -900.0])
def test_clocks_within_a_second(ahead_ms: float) -> None:
    found = clocks([rounds(0.0), rounds(ahead_ms)])
    assert not found.is_wrong
    assert f"at most {abs(ahead_ms):.1f} ms" in found.found


@pytest.mark.parametrize("ahead_ms", [5000.0, -5000.0])
def test_a_clock_that_is_wrong_is_named(ahead_ms: float) -> None:
    found = clocks([rounds(3.0), rounds(ahead_ms)])
    assert found.is_wrong
    assert found.found == "at most 5000.0 ms from that of rank 0 (rank 2)"


def test_a_slow_link_is_named() -> None:
    fast = neighbours([(0, 0.05, 8.0), (1, 0.09, 1.0)])
    assert not fast.is_wrong
    assert fast.found == "2 pairs; the slowest, ranks 1 and 2: 0.090 ms, 1.00 GB/s"
    assert neighbours([(0, 0.05, 8.0), (1, 9.0, 0.02)]).is_wrong
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
