"""Reading examples: every container gives the same ones, and a broken one is named to the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan.data.rows import examples
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.rows.examples import (
    InstructExamples,
    is_local_path,
    read_examples,
)
from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, RowShape, has_turns, row_shape
from torchtitan.data.rows.messages import BESIDE, chat_messages

FIELDS = ("instruction", "output")
ROWS = [
    {"instruction": f"say {i} twice: ü\u2028", "output": f"{i} {i}", "extra": i} for i in range(7)
]
KEPT = [{field: example[field] for field in FIELDS} for example in ROWS]


def jsonl(examples: list[Any]) -> bytes:
    return "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples).encode()


def write(path: Path, examples: list[dict[str, Any]]) -> Path:
    if path.name.endswith(".jsonl"):
        path.write_bytes(jsonl(examples))
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(jsonl(examples)))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(examples, indent=2), "utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(examples), path)
    return path


@pytest.mark.parametrize(
    ("name", "first"),
    [("a.jsonl", 1), ("a.jsonl.gz", 1), ("a.json", 0), ("a.parquet", 0)],
)
def test_every_container_gives_the_same_examples_and_places(
    tmp_path: Path, name: str, first: int
) -> None:
    path = write(tmp_path / name, ROWS)
    examples = read_examples(str(path), "alpaca")
    assert [examples.examples[i] for i in range(len(examples))] == KEPT
    assert [examples.place(i) for i in range(7)] == [(str(path), first + i) for i in range(7)]
    assert not examples.is_remote


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "c.parquet", ROWS[5:])
    write(tmp_path / "b.json", ROWS[3:5])
    write(tmp_path / "a.jsonl.gz", ROWS[:3])
    (tmp_path / "README.md").write_text("not data")
    examples = read_examples(str(tmp_path), "alpaca")
    assert [examples.examples[i] for i in range(len(examples))] == KEPT
    places = [(Path(file).name, number) for file, number in map(examples.place, range(7))]
    assert places == [
        *[("a.jsonl.gz", 1), ("a.jsonl.gz", 2), ("a.jsonl.gz", 3)],
        *[("b.json", 0), ("b.json", 1), ("c.parquet", 0), ("c.parquet", 1)],
    ]
    with pytest.raises(IndexError):
        examples.place(7)


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "test.jsonl", "validation.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "eval.jsonl"],
        ["my_train.jsonl", "my_dev.jsonl", "notes.jsonl"],
        ["a.jsonl", "b.jsonl"],
        ["training1.jsonl", "trains.jsonl", "Test.jsonl"],
        ["x train.jsonl", "x-val.jsonl", "contest.jsonl"],
    ],
)
def test_of_the_parts_of_a_data_set_that_to_train_on_is_read_as_datasets_does(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        write(tmp_path / name, [{"instruction": name, "output": "y"}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / ".cache"))
    examples = read_examples(str(tmp_path), "alpaca")
    assert [row["instruction"] for row in examples.examples] == rows["instruction"]


def test_files_of_one_part_that_is_not_to_train_on_are_read(tmp_path: Path) -> None:
    for name in ("valid-0.jsonl", "valid-1.jsonl"):
        write(tmp_path / name, ROWS)
    assert len(read_examples(str(tmp_path), "alpaca")) == 14


def test_hidden_files_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "._train.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert len(read_examples(str(tmp_path), "alpaca")) == 7


def test_columns_that_are_left_out_are_told(tmp_path: Path) -> None:
    late = {**ROWS[0], "system": "Be kind.", "score": 1}
    examples = read_examples(str(write(tmp_path / "a.jsonl", [ROWS[0], late])), "auto")
    columns = "columns instruction, output, system; left out: extra, score"
    assert examples.about == f"{tmp_path / 'a.jsonl'}: rows of kind 'alpaca', {columns}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_nulls_are_kept_where_somebody_wrote_them(tmp_path: Path, name: str) -> None:
    calls = [
        {"function": {"name": "book", "arguments": {"city": "Rome", "hotel": None}}},
        {"function": {"name": "book", "arguments": {"city": "Rome", "hotel": "Plaza"}}},
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    examples = read_examples(str(write(tmp_path / name, [{"messages": messages}])), "auto")
    ((message,), _) = examples.read(0, lambda said: said)
    city, full = {"city": "Rome"}, {"city": "Rome", "hotel": "Plaza"}
    first = {**city, "hotel": None} if name == "a.jsonl" else city
    arguments = [call["function"]["arguments"] for call in message.others["tool_calls"]]
    assert arguments == [first, full]


def test_empty_lines_are_no_examples_but_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS[:1]) + b"\n  \n" + jsonl(ROWS[1:2]))
    examples = read_examples(str(path), "alpaca")
    assert [examples.place(i)[1] for i in range(len(examples))] == [1, 4]


@pytest.mark.parametrize(
    ("line", "field", "text"),
    [
        (b'{"instruction": "x", "output"', None, "line 3: is not valid JSON"),
        (b'{"instruction": "\xff", "output": "x"}', None, "line 3: is not valid JSON"),
        (b'["x", "y"]', None, "line 3: is a list; expected an object with ['instruction', 'outp"),
        (
            b'{"instruction": "x", "reply": "y"}',
            "output",
            "line 3: field 'output' is missing; expected ['instruction', 'output'], the example "
            "has ['instruction', 'reply']; training.dataset = \"auto\" finds the kind of rows",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, field: str | None, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS[:2]) + line + b"\n" + jsonl(ROWS[2:]))
    with pytest.raises(DataExampleError) as info:
        read_examples(str(path), "alpaca")
    assert (f"field {field!r}" in str(info.value)) is (field is not None)
    assert f"{path}, {text}" in str(info.value)
    assert isinstance(info.value, ValueError)


def test_a_broken_element_of_a_list_is_named_by_index(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*ROWS[:2], "no object"]))
    with pytest.raises(
        DataExampleError, match=r"a\.json, example 2: is a string; expected an object"
    ):
        read_examples(str(path), "alpaca")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("is_list", [True, False])
def test_a_file_of_json_is_read_by_what_it_holds(
    tmp_path: Path, name: str, mark: bytes, is_list: bool
) -> None:
    path = tmp_path / name
    data = mark + (json.dumps(ROWS, indent=1).encode() if is_list else jsonl(ROWS))
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    examples = read_examples(str(path), "alpaca")
    assert [examples.examples[i] for i in range(len(examples))] == KEPT
    rows = [*ROWS[:2], {"instruction": "x"}]
    data = mark + (json.dumps(rows).encode() if is_list else jsonl(rows))
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataExampleError, match="example 2: " if is_list else "line 3: "):
        read_examples(str(path), "alpaca")


def test_what_a_file_says_twice_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS[:1]) + b'{"instruction": "x", "output": "y", "output": "z"}\n')
    with pytest.raises(DataExampleError, match=r"a\.jsonl, line 2: .* the key 'output' twice"):
        read_examples(str(path), "alpaca")
    words = pyarrow.array(["a"])
    table = pyarrow.Table.from_arrays([words] * 3, names=["instruction", "output", "output"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataExampleError, match=r"a\.parquet: .* the column 'output' twice"):
        read_examples(str(tmp_path / "a.parquet"), "alpaca")
    twice = pyarrow.StructArray.from_arrays([words, words], names=["role", "role"])
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1], twice)})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(DataExampleError, match=r"b\.parquet: is not a readable parquet file"):
        read_examples(str(tmp_path / "b.parquet"), "messages")


CALLS = [
    {"city": "Paris"},
    {"expression": "2 + 2", "options": {"digits": 3}},
    {"options": {"base": 2}, "names": ["a", None]},
]
TOOLS = [
    [{"name": "map", "parameters": {"city": {"type": "string"}}}],
    [{"name": "sum", "parameters": {"expression": {"type": "string"}}}],
    [],
]


def test_rows_say_the_same_in_every_container(tmp_path: Path) -> None:
    """Columnar files give every object each key that one of them has in any row."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]},
            ],
            "tools": tools,
        }
        for a, tools in zip(CALLS, TOOLS, strict=True)
    ]
    said = []
    for name in ("a.jsonl", "a.json", "a.parquet"):
        examples = read_examples(str(write(tmp_path / name, rows)), "messages")
        said.append([examples.read(i, lambda said: said) for i in range(len(rows))])
    assert said[0] == said[1] == said[2]
    found = [each.messages[1].others["tool_calls"][0]["function"]["arguments"] for each in said[2]]
    assert found == CALLS


def test_a_column_that_a_parquet_file_lacks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"instruction": "x"}])
    with pytest.raises(DataExampleError, match=r"a\.parquet, example 0: field 'output' is missing"):
        read_examples(str(path), "alpaca")


def test_unreadable_containers_are_named(tmp_path: Path) -> None:
    parquet = tmp_path / "a.parquet"
    parquet.write_bytes(b"PAR1 no more than that")
    with pytest.raises(DataExampleError, match=r"a\.parquet: is not a readable parquet file"):
        read_examples(str(parquet), "alpaca")
    packed = gzip.compress(jsonl(ROWS * 50), mtime=0)
    gz = tmp_path / "a.jsonl.gz"
    gz.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataExampleError, match=r"a\.jsonl\.gz, line \d+: cannot be unpacked"):
        read_examples(str(gz), "alpaca")
    gz.write_bytes(jsonl(ROWS))
    with pytest.raises(DataExampleError, match=r"line 1: cannot be unpacked \(Not a gzipped file"):
        read_examples(str(gz), "alpaca")


def test_a_row_that_a_small_file_unpacks_to_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "MOST_BYTES", 2**20)
    gz = tmp_path / "a.jsonl.gz"
    long = {**ROWS[0], "output": "x" * (2**20 - 200)}
    gz.write_bytes(gzip.compress(jsonl([long])))
    assert len(read_examples(str(gz), "alpaca")) == 1
    gz.write_bytes(gzip.compress(jsonl([ROWS[0]]) + b" " * 2**26))
    assert gz.stat().st_size < 2**17
    with pytest.raises(DataExampleError, match=r"a\.jsonl\.gz, line 2: has more than 1 MiB"):
        read_examples(str(gz), "alpaca")


def test_what_counts_as_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for path in ("owner/name", "./owner", str(tmp_path)):
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
        read_examples("./other", "alpaca", key="validation.dataset_path")


def test_paths_without_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"training\.dataset_path .* folder without a file"):
        read_examples(str(tmp_path), "alpaca")
    with pytest.raises(ValueError, match=r"notes\.txt'; a data file must end in one of \.jsonl"):
        read_examples(str(tmp_path / "notes.txt"), "alpaca")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl', which holds no examples"):
        read_examples(str(tmp_path / "empty.jsonl"), "alpaca")


def test_a_hub_name_goes_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = read_examples("owner/name", "alpaca")
    assert asked == [("owner/name", "train")]
    assert examples.is_remote
    assert isinstance(examples.examples, datasets.Dataset), "a hub data set stays on disk"
    assert [examples.examples[i] for i in range(len(examples))] == KEPT
    assert examples.place(4) == ("owner/name", 4)
    with pytest.raises(
        DataExampleError, match=r"^owner/name, example 0: field 'conversations' is missing"
    ):
        read_examples("owner/name", "sharegpt")


def test_an_empty_hub_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list([])
    )
    with pytest.raises(ValueError, match=r"training\.dataset_path is 'owner/name', which holds no"):
        read_examples("owner/name", "alpaca")


def test_places_of_examples_without_numbers() -> None:
    examples = InstructExamples([{}, {}, {}], (("hub", 3),), chat_messages)
    assert [examples.place(i) for i in range(3)] == [("hub", 0), ("hub", 1), ("hub", 2)]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (["messages"], "messages"),
        (["prompt", "prompt_id", "messages"], "messages"),  # as ultrachat_200k has them
        (["id", "conversations"], "sharegpt"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output", "text"], "alpaca"),  # as alpaca-gpt4 has them
        (["output", "instruction"], "alpaca"),
    ],
)
def test_the_kind_is_chosen_by_the_columns(columns: list[str], kind: str) -> None:
    assert row_shape("auto", columns, {}).kind == kind


def test_columns_that_are_called_otherwise() -> None:
    named = {"prompt": "question", "completion": "answer"}
    shape = row_shape("auto", ["question", "answer", "instruction"], named)
    required = {"prompt": "question", "completion": "answer"}
    assert shape == RowShape("prompt_completion", required, {name: name for name in BESIDE})
    told = "rows of kind 'prompt_completion', columns question (as prompt), answer (as completion)"
    assert shape.told(["question", "answer"]) == told
    assert shape.told(["question", "answer", "id", "url"]) == f"{told}; left out: id, url"
    # Another source, which calls them as they are usually called.
    assert row_shape("auto", ["prompt", "completion"], named).required == {
        "prompt": "prompt",
        "completion": "completion",
    }


def test_a_column_that_stands_for_an_answer_says_nothing_else() -> None:
    shape = row_shape("auto", ["text", "label"], {"prompt": "text", "completion": "label"})
    assert shape.required == {"prompt": "text", "completion": "label"}
    assert "label" not in shape.optional


def test_rows_of_no_kind_are_told_with_their_columns() -> None:
    with pytest.raises(ValueError, match=r"has the columns \['text'\], of which .*data\.columns"):
        row_shape("auto", ["text"], {})


def test_a_kind_that_is_named_is_taken() -> None:
    shape = row_shape("prompt_completion", ["messages", "prompt", "completion"], {})
    assert shape.kind == "prompt_completion"


def test_kinds_that_may_have_several_answers() -> None:
    assert [name for name in INSTRUCT_DATASETS if not has_turns(name)] == ["alpaca"]
    assert not has_turns("c4")
