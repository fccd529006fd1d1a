import errno
import os
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


def test_a_line_that_was_cut_or_glued_costs_that_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = 'step,name,fraction\n1,a,0.5\n2,"b3,c,0.5\n4\n5,"e,f",0.5\n'
    (tmp_path / "rows.csv").write_text(text)
    assert ROWS.read(tmp_path) == [Row(1, "a", 0.5), Row(5, "e,f", 0.5)]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{tmp_path / 'rows.csv'}, line {line} is left out: it has {n} cells for 3 columns"
        for line, n in ((3, 2), (4, 1))
    ]


def test_a_disk_that_is_full_for_a_moment_costs_the_lines_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ROWS.write(tmp_path, [Row(1, "a", 0.5)])
    really_write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) <= 3:
            raise OSError(errno.ENOSPC, "No space left")
        return really_write(descriptor, content[: len(content) // 2])

    for at_once in (3, 1):
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            ROWS.append(tmp_path, [Row(2, "b", 0.5)] * at_once)
        monkeypatch.setattr(os, "write", really_write)
        ROWS.append(tmp_path, [Row(3, "c", 0.5)])
    assert ROWS.read(tmp_path) == [Row(1, "a", 0.5), *[Row(3, "c", 0.5)] * 2]


def test_lines_after_one_that_was_cut_are_their_own(tmp_path: Path) -> None:
    """As where a process was killed while it wrote."""
    (tmp_path / "rows.csv").write_text("step,name,fraction\n1")
    ROWS.append(tmp_path, [Row(2, "b", 0.5)])
    assert ROWS.read(tmp_path) == [Row(2, "b", 0.5)]


def test_a_file_whose_beginning_found_no_room_begins_later(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    ROWS.append(tmp_path, [Row(2, "b", 0.5)])
    assert ROWS.read(tmp_path) == [Row(2, "b", 0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has the columns ; not step, name, fraction"),
        ("step,name\n1,a\n", "has the columns step, name; not step, name, fraction"),
        (
            "step,name,fraction\n1,a,0.5\nx,a,0.5\n",
            r"rows.csv, line 3: step is 'x'; it must be a whole n",
        ),
    ],
)
def test_what_cannot_be_read_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ROWS.read(tmp_path)
