"""What a small parquet file may unpack to."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from torchtitan.data.rows import parquet
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.rows.parquet import read_parquet


def write(file: Path, texts: list[str], **options: object) -> Path:
    table = pyarrow.table({"text": texts, "n": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, file, compression="zstd", **options)
    return file


@pytest.mark.parametrize("texts", [["x" * 2**21], ["a"] * 9 + ["x" * 2**21]], ids=["one", "last"])
def test_a_row_is_bounded(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_BYTES", 2**20)
    file = write(tmp_path / "a.parquet", texts)
    assert file.stat().st_size < 2**12
    with pytest.raises(DataExampleError, match=r"a\.parquet: has a row of more than 1 MiB"):
        list(read_parquet(file, ["text"]))
    assert [row["n"] for _, row in read_parquet(file, ["n"])] == list(range(len(texts)))


def test_a_row_that_is_long_on_average_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_BYTES", 2**20)
    file = write(tmp_path / "a.parquet", ["x" * 2**21])
    monkeypatch.delattr(pyarrow.parquet.ParquetFile, "iter_batches")
    with pytest.raises(DataExampleError, match="has a row of more than 1 MiB"):
        list(read_parquet(file, ["text"]))


def test_a_batch_of_one_value_that_a_dictionary_repeats_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rows of 1 MiB are 2 GiB in one batch; 30 are left of it."""
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2**25)
    file = write(tmp_path / "a.parquet", ["x" * 2**20] * 2000, dictionary_pagesize_limit=2**22)
    assert file.stat().st_size < 2**14
    before = pyarrow.total_allocated_bytes()
    rows = read_parquet(file, ["text"])
    assert next(rows) == (0, {"text": "x" * 2**20})
    assert pyarrow.total_allocated_bytes() - before < 2**27
    rows.close()


def test_rows_keep_their_numbers_over_groups_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1)
    file = write(tmp_path / "a.parquet", [str(i) for i in range(100)], row_group_size=40)
    assert list(read_parquet(file, ["text"])) == [(i, {"text": str(i)}) for i in range(100)]
