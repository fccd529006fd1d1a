"""Moves of a small run by hand."""

from pathlib import Path

from timelyfreeze.records import MOVES, Move
from torchtitan.freezing.report.step_record import MoveRecord, TimedMove

FIRST = Move(6, 3, 4, 1, "4 2 2 2", 2.5)
SECOND = Move(8, 8, 2, 2, "8 2", 1.25)


def test_steps_before_and_after_without_those_that_run_cold(tmp_path: Path) -> None:
    moves = MoveRecord(tmp_path)
    for seconds in (9.0, 9.0, 0.5, 0.7, 0.6):
        moves.add_step(seconds)
    assert not (tmp_path / MOVES.name).exists(), "a run that stays has no such file"
    moves.add(FIRST)
    for seconds in (9.0, 9.0):
        moves.add_step(seconds)
    moves.add(SECOND)
    for seconds in (9.0, 9.0, 0.2):
        moves.add_step(seconds)
    assert moves.timed() == [TimedMove(FIRST, 600.0, None), TimedMove(SECOND, None, 200.0)]
    assert moves.seconds == 3.75


def test_each_move_is_on_disk_at_once(tmp_path: Path) -> None:
    moves = MoveRecord(tmp_path)
    moves.add(FIRST)
    assert MOVES.read(tmp_path) == [FIRST]
    moves.add(SECOND)
    assert MOVES.read(tmp_path) == [FIRST, SECOND]


def test_ranks_that_write_nothing_still_tell() -> None:
    moves = MoveRecord(None)
    moves.add(FIRST)
    assert [timed.move for timed in moves.timed()] == [FIRST]
