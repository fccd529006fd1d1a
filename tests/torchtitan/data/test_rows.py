"""Reading rows: every container gives the same rows, and a broken row is named to the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan.data.rows import DataRowError, InstructRows, is_local_path, read_rows

FIELDS = ("instruction", "output")
ROWS = [
    {"instruction": f"say {i} twice: ü\u2028", "output": f"{i} {i}", "extra": i} for i in range(7)
]
KEPT = [{field: row[field] for field in FIELDS} for row in ROWS]


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.name.endswith(".jsonl"):
        path.write_bytes(jsonl(rows))
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(jsonl(rows)))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=2), "utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("name", "first"),
    [("a.jsonl", 1), ("a.jsonl.gz", 1), ("a.json", 0), ("a.parquet", 0)],
)
def test_every_container_gives_the_same_rows_and_places(
    tmp_path: Path, name: str, first: int
) -> None:
    path = write(tmp_path / name, ROWS)
    rows = read_rows(str(path), FIELDS)
    assert [rows[i] for i in range(len(rows))] == KEPT
    assert [rows.place(i) for i in range(7)] == [(str(path), first + i) for i in range(7)]
    assert not rows.is_remote


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "c.parquet", ROWS[5:])
    write(tmp_path / "b.json", ROWS[3:5])
    write(tmp_path / "a.jsonl.gz", ROWS[:3])
    (tmp_path / "README.md").write_text("not data")
    rows = read_rows(str(tmp_path), FIELDS)
    assert [rows[i] for i in range(len(rows))] == KEPT
    places = [(Path(file).name, number) for file, number in map(rows.place, range(7))]
    assert places == [
        *[("a.jsonl.gz", 1), ("a.jsonl.gz", 2), ("a.jsonl.gz", 3)],
        *[("b.json", 0), ("b.json", 1), ("c.parquet", 0), ("c.parquet", 1)],
    ]
    with pytest.raises(IndexError):
        rows.place(7)


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS[:1]) + b"\n  \n" + jsonl(ROWS[1:2]))
    rows = read_rows(str(path), FIELDS)
    assert [rows.place(i)[1] for i in range(len(rows))] == [1, 4]


@pytest.mark.parametrize(
    ("line", "field", "text"),
    [
        (b'{"instruction": "x", "output"', None, "line 3: is not valid JSON"),
        (b'{"instruction": "\xff", "output": "x"}', None, "line 3: is not valid JSON"),
        (b'["x", "y"]', None, "line 3: is a list; expected an object with ['instruction', 'outp"),
        (
            b'{"instruction": "x", "reply": "y"}',
            "output",
            "line 3: field 'output' is missing; expected ['instruction', 'output'], the row has "
            "['instruction', 'reply']",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, field: str | None, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS[:2]) + line + b"\n" + jsonl(ROWS[2:]))
    with pytest.raises(DataRowError) as info:
        read_rows(str(path), FIELDS)
    assert (info.value.file, info.value.row, info.value.field) == (str(path), 3, field)
    assert f"{path}, {text}" in str(info.value)
    assert isinstance(info.value, ValueError)


def test_a_broken_element_of_a_list_is_named_by_index(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*ROWS[:2], "no object"]))
    with pytest.raises(DataRowError, match=r"a\.json, row 2: is a string; expected an object"):
        read_rows(str(path), FIELDS)


def test_a_json_file_must_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": ROWS}))
    with pytest.raises(DataRowError, match=r"a\.json: holds an object; expected a list of obj"):
        read_rows(str(path), FIELDS)
    path.write_bytes(jsonl(ROWS))
    with pytest.raises(DataRowError, match=r"a\.json: is not valid JSON \(Extra data: line 2"):
        read_rows(str(path), FIELDS)


def test_a_column_that_a_parquet_file_lacks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"instruction": "x"}])
    with pytest.raises(DataRowError, match=r"a\.parquet, row 0: field 'output' is missing"):
        read_rows(str(path), FIELDS)


def test_unreadable_containers_are_named(tmp_path: Path) -> None:
    parquet = tmp_path / "a.parquet"
    parquet.write_bytes(b"PAR1 no more than that")
    with pytest.raises(DataRowError, match=r"a\.parquet: is not a readable parquet file"):
        read_rows(str(parquet), FIELDS)
    packed = gzip.compress(jsonl(ROWS * 50), mtime=0)
    gz = tmp_path / "a.jsonl.gz"
    gz.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataRowError, match=r"a\.jsonl\.gz, line \d+: cannot be unpacked"):
        read_rows(str(gz), FIELDS)
    gz.write_bytes(jsonl(ROWS))
    with pytest.raises(DataRowError, match=r"line 1: cannot be unpacked \(Not a gzipped file"):
        read_rows(str(gz), FIELDS)


def test_what_counts_as_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for path in ("owner/name", "./owner", "~/owner", str(tmp_path)):
        assert is_local_path(path), path
    for path in ("owner/other", "name"):
        assert not is_local_path(path), path
    for path in (
        "./other",
        "../other",
        "/other",
        "~/other",
        "other.jsonl",
        "o/x.parquet",
        "x.json",
    ):
        with pytest.raises(FileNotFoundError, match=r"^training\.dataset_path is '") as info:
            is_local_path(path)
        assert repr(path) in str(info.value)
    with pytest.raises(FileNotFoundError, match=r"^validation\.dataset_path"):
        read_rows("./other", FIELDS, key="validation.dataset_path")


def test_a_home_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", ROWS)
    assert len(read_rows("~/a.jsonl", FIELDS)) == 7


def test_paths_without_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"training\.dataset_path .* folder without a file"):
        read_rows(str(tmp_path), FIELDS)
    with pytest.raises(ValueError, match=r"notes\.txt'; a data file must end in one of \.jsonl"):
        read_rows(str(tmp_path / "notes.txt"), FIELDS)
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl', which holds no rows"):
        read_rows(str(tmp_path / "empty.jsonl"), FIELDS)


def test_a_hub_name_goes_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_rows("owner/name", FIELDS)
    assert asked == [("owner/name", "train")]
    assert rows.is_remote
    assert isinstance(rows.rows, datasets.Dataset), "a hub data set stays on disk"
    assert [rows[i] for i in range(len(rows))] == KEPT
    assert rows.place(4) == ("owner/name", 4)
    with pytest.raises(DataRowError, match=r"^owner/name, row 0: field 'reply' is missing"):
        read_rows("owner/name", ("reply",))


def test_an_empty_hub_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list([])
    )
    with pytest.raises(ValueError, match=r"training\.dataset_path is 'owner/name', which holds no"):
        read_rows("owner/name", FIELDS)


def test_places_of_rows_without_numbers() -> None:
    rows = InstructRows([{}, {}, {}], (("hub", 3),))
    assert [rows.place(i) for i in range(3)] == [("hub", 0), ("hub", 1), ("hub", 2)]
