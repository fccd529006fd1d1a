"""``moves.csv``, line by line."""

from pathlib import Path

import pytest

from timelyfreeze.records.tables import MOVES, Move


def test_a_line_for_each_move(tmp_path: Path) -> None:
    moves = [Move(13, 1, 4, 1, "3 2 2 3", 2.5), Move(37, 8, 2, 2, "8 2", 3.25)]
    MOVES.write(tmp_path, moves)
    assert (tmp_path / "moves.csv").read_text().splitlines() == [
        "step,frozen_layers,ranks,replicas,split,seconds",
        "13,1,4,1,3 2 2 3,2.5",
        "37,8,2,2,8 2,3.25",
    ]
    assert MOVES.read(tmp_path) == moves


@pytest.mark.parametrize(
    "line", ["0,1,4,1,4,1.0", "1,1,0,1,4,1.0", "1,1,4,0,4,1.0", "1,1,4,1,4,-1"]
)
def test_what_no_run_can_have_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "moves.csv").write_text(f"{','.join(MOVES.header)}\n{line}\n")
    with pytest.raises(ValueError, match=r"moves\.csv, line 2"):
        MOVES.read(tmp_path)
