"""Moves of a small run by hand."""

from pathlib import Path

from tests.torchtitan.helpers.report_runs import end_step, run_in
from timelyfreeze.records import MOVES, Move
from torchtitan.freezing.report.steps import Moves, TimedMove

FIRST = Move(6, 3, 4, 1, "4 2 2 2", 2.5)
SECOND = Move(8, 8, 2, 2, "8 2", 1.25)


def test_steps_before_and_after_without_those_that_run_cold(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path))
    for seconds in (9.0, 9.0, 0.5, 0.7, 0.6):
        end_step(moves, 1, None, seconds)
    assert not (tmp_path / MOVES.name).exists(), "a run that stays has no such file"
    moves.move(FIRST)
    for seconds in (9.0, 9.0):
        end_step(moves, 1, None, seconds)
    moves.move(SECOND)
    for seconds in (9.0, 9.0, 0.2):
        end_step(moves, 1, None, seconds)
    assert moves.timed() == [TimedMove(FIRST, 600.0, None), TimedMove(SECOND, None, 200.0)]


def test_each_move_is_on_disk_at_once(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path))
    moves.move(FIRST)
    assert MOVES.read(tmp_path) == [FIRST]
    moves.move(SECOND)
    assert MOVES.read(tmp_path) == [FIRST, SECOND]


def test_ranks_that_write_nothing_still_tell(tmp_path: Path) -> None:
    moves = Moves(run_in(tmp_path, is_shown=False))
    moves.move(FIRST)
    assert [timed.move for timed in moves.timed()] == [FIRST]
    assert list(tmp_path.iterdir()) == []
