"""Files are written whole; where nothing can be written is told, and nothing left there."""

import errno
import os
from pathlib import Path

import pytest

from timelyfreeze.files.safe_write import write_obstacle, write_whole


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b"
    write_whole(file, b"old")
    assert write_whole(file, b"new") == file
    assert file.read_bytes() == b"new"
    assert list(file.parent.iterdir()) == [file]


def test_somebody_elses_file_is_not_written_over_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "b.part").write_bytes(b"the user's")
    write_whole(tmp_path / "b", b"new")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files == {"b": b"new", "b.part": b"the user's"}


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "b", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_to_be_made_is_not_made_yet(tmp_path: Path) -> None:
    assert write_obstacle(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert write_obstacle(folder) == f"{str(tmp_path / 'file')!r} is no folder"


def test_a_name_that_no_folder_can_have_is_told(tmp_path: Path) -> None:
    assert write_obstacle(tmp_path / "a\0b") == "it can be no folder: embedded null byte"
    assert write_obstacle(tmp_path / ("x" * 300)) == "it can be no folder: File name too long"
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in str(write_obstacle(tmp_path / "loop" / "run"))


def test_a_place_that_takes_no_files_is_told() -> None:
    obstacle = write_obstacle(Path("/proc/sys/none"))
    assert obstacle is not None
    assert obstacle.startswith("nothing can be written to '/proc/sys': ")


def test_an_interrupt_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_whole(tmp_path / "a.txt", b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.txt", b"old")]
