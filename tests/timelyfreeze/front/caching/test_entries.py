"""Entries on the disk: what is read is what was written, or nothing."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from timelyfreeze.front.caching.folder import (
    EntryError,
    Row,
    entry_file,
    read_entry,
    write_entry,
)

ROW = Row(7, "abc")
OUTPUT = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_entry_comes_back_to_the_last_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    output = OUTPUT.to(dtype)
    size = write_entry(tmp_path / "made", ROW, output)
    found = read_entry(tmp_path / "made", ROW.number).of(ROW)
    assert found.dtype is dtype
    assert torch.equal(found, output)
    assert [f.name for f in (tmp_path / "made").iterdir()] == ["7.safetensors"]
    assert (tmp_path / "made" / "7.safetensors").stat().st_size == size


@pytest.mark.parametrize("kept", [0, 1, 7, 100, -1])
def test_a_cut_entry_is_none(tmp_path: Path, kept: int) -> None:
    write_entry(tmp_path, ROW, OUTPUT)
    file = entry_file(tmp_path, ROW.number)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(EntryError, match=r"7\.safetensors is cut"):
        read_entry(tmp_path, ROW.number)


def test_every_bit_of_the_output_is_checked(tmp_path: Path) -> None:
    write_entry(tmp_path, ROW, OUTPUT)
    file = entry_file(tmp_path, ROW.number)
    whole = file.read_bytes()
    for place in range(len(whole) - OUTPUT.nbytes, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(EntryError, match="checksum"):
            read_entry(tmp_path, ROW.number)


@pytest.mark.parametrize("other", [Row(8, "abc"), Row(7, "other tokens")])
def test_an_entry_of_another_row_is_none(tmp_path: Path, other: Row) -> None:
    write_entry(tmp_path, ROW, OUTPUT)
    entry_file(tmp_path, 7).rename(entry_file(tmp_path, other.number))
    with pytest.raises(EntryError, match="another row"):
        read_entry(tmp_path, other.number).of(other)


def test_somebody_elses_file_is_none(tmp_path: Path) -> None:
    save_file({"output": OUTPUT}, entry_file(tmp_path, 7))
    assert torch.equal(load_file(entry_file(tmp_path, 7))["output"], OUTPUT)
    with pytest.raises(EntryError, match="no entry"):
        read_entry(tmp_path, ROW.number)


@pytest.mark.parametrize("content", ["[7]", "7", "null", '"entry"'])
def test_a_file_that_says_something_else_is_none(tmp_path: Path, content: str) -> None:
    save_file({"output": OUTPUT}, entry_file(tmp_path, 7), {"entry": content})
    with pytest.raises(EntryError, match="no entry"):
        read_entry(tmp_path, ROW.number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copied_entry_does_not_need_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """An entry that is not copied would end the process: its memory is the file's."""
    write_entry(tmp_path, ROW, OUTPUT.to(dtype))
    copied = read_entry(tmp_path, ROW.number).copied()
    os.truncate(entry_file(tmp_path, ROW.number), 0)
    assert torch.equal(copied.of(ROW), OUTPUT.to(dtype))
