from dataclasses import dataclass
from pathlib import Path

import pytest

from timelyfreeze.files.table import Table


@dataclass(frozen=True)
class Row:
    step: int
    name: str
    fraction: float | None = None


ROWS = Table("rows.csv", Row)


def test_rows_come_back_and_empty_cells_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    ROWS.write(tmp_path, [Row(1, "a,b", 0.25)])
    ROWS.append(tmp_path, [Row(2, "", None)])
    assert path.read_text() == 'step,name,fraction\n1,"a,b",0.25\n2,,\n'
    assert ROWS.read(tmp_path) == [Row(1, "a,b", 0.25), Row(2, "", None)]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("step,name,fraction\n1,a,0.5\n2,b,0.1")
    assert ROWS.read(tmp_path) == [Row(1, "a", 0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has the columns ; not step, name, fraction"),
        ("step,name\n1,a\n", "has the columns step, name; not step, name, fraction"),
        (
            "step,name,fraction\n1,a,0.5\nx,a,0.5\n",
            r"rows.csv, line 3: step is 'x'; it must be a whole n",
        ),
        ("step,name,fraction\n1,a\n", r"rows.csv, line 2: it has 2 cells for 3 columns"),
    ],
)
def test_what_cannot_be_read_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ROWS.read(tmp_path)
