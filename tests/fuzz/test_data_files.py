"""Instruction data that was cut, flipped or written wrongly: taken, or named with its example."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fuzz.mangling import DEEP, VALUES, fuzzed, mangled_bytes, mangled_json, message_of
from tests.torchtitan.helpers.job_configs import config
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.rows.examples import read_examples
from torchtitan.freezing.checks.data import example_errors
from torchtitan.freezing.launch import launch

ROOT = Path(__file__).resolve().parents[2]
ALPACA: list[dict[str, Any]] = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say so.", "input": "", "output": "so"},
    {"instruction": "Be still.", "input": " ", "output": ""},
]
SHAREGPT: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"conversations": [{"from": "system", "value": ""}, {"from": "gpt", "value": "c"}]},
]
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "name": "add"},
]
SAID = [{"role": "assistant", "content": "b"}]
MESSAGES: list[dict[str, Any]] = [
    {"messages": ASKED + SAID, "tools": [{"name": "add"}], "prompt": "x", "completion": "y"},
    {"messages": SAID, "tools": "[]", "prompt": ASKED, "completion": SAID},
]
TEMPLATE = ChatTemplate(
    "x",
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{{ m.tool_calls | default([]) | tojson }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    {},
)


def _parquet(examples: list[dict[str, Any]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(examples), buffer, **options)
    return buffer.getvalue()


def _lines(examples: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(example).encode() for example in examples)


WHOLE = {
    "examples.json": json.dumps(ALPACA).encode(),
    "examples.jsonl": _lines(ALPACA),
    "examples.jsonl.gz": gzip.compress(_lines(ALPACA), mtime=0),
    "examples.parquet": _parquet(ALPACA),
    "plain.parquet": _parquet(ALPACA, compression="none", use_dictionary=False),
}


def _use(path: Path, kind: str) -> None:
    """Read a data set as a launch does, and make sure that all of its text is text."""
    examples = read_examples(str(path), kind)
    for index in range(len(examples)):
        for message in examples.read(index, lambda said: said.messages):
            message.content.encode()
            (message.context or "").encode()
        examples.read(index, TEMPLATE.mark).text.encode()


def _said(path: Path, kind: str) -> str | None:
    message = message_of(lambda: _use(path, kind))
    assert message is None or str(path) in message
    return message


@pytest.mark.parametrize("name", list(WHOLE))
def test_a_whole_file_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    assert _said(tmp_path / name, "alpaca") is None


@pytest.mark.parametrize("name", list(WHOLE))
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    @fuzzed(30)
    @given(data=mangled_bytes(WHOLE[name]))
    def breaks(data: bytes) -> None:
        path.write_bytes(data)
        _said(path, "alpaca")

    breaks()


@pytest.mark.parametrize("name", list(WHOLE))
def test_a_file_that_ends_early_is_never_taken_for_a_whole_one(tmp_path: Path, name: str) -> None:
    path, whole = tmp_path / name, WHOLE[name]
    ends = range(0, len(whole), max(1, len(whole) // 40))
    # A jsonl file may end after any of its lines.
    examples_end = (
        [i for i, byte in enumerate(whole) if byte == 10] if name == "examples.jsonl" else []
    )
    for end in ends:
        path.write_bytes(whole[:end])
        taken = _said(path, "alpaca") is None
        assert taken == any(end in (n, n + 1) for n in examples_end)


@fuzzed(30)
@given(
    index=st.integers(0, len(ALPACA) - 1),
    field=st.sampled_from(["instruction", "input", "output"]),
    value=VALUES.filter(lambda value: not isinstance(value, str)) | st.just("half: \ud83d"),
    name=st.sampled_from(["examples.json", "examples.jsonl"]),
)
def test_a_field_that_is_no_text_is_named_with_its_example(
    tmp_path: Path, index: int, field: str, value: Any, name: str
) -> None:
    assume(field != "input" or value is not None)  # that is an example without one
    examples = [dict(example) for example in ALPACA]
    examples[index][field] = value
    path = tmp_path / name
    path.write_bytes(
        _lines(examples) if name == "examples.jsonl" else json.dumps(examples).encode()
    )
    place = (
        f"{path}, line {index + 1}: " if name == "examples.jsonl" else f"{path}, example {index}: "
    )
    assert f"{place}field '{field}' " in str(_said(path, "alpaca"))


@fuzzed(40)
@given(text=mangled_json(SHAREGPT))
def test_a_broken_conversation_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "examples.json"
    path.write_text(text)
    _said(path, "sharegpt")


@fuzzed(60)
@given(text=mangled_json(MESSAGES), kind=st.sampled_from(["auto", "messages", "prompt_completion"]))
def test_broken_messages_and_tools_are_named(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "examples.json"
    path.write_text(text)
    _said(path, kind)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2]), "example 0: field 'output' is a number; expected a string"),
        (pa.array([b"a", b"\xff"]), "example 0: field 'output' is bytes; expected a string"),
        (pa.array(["a", None]), "example 1: field 'output' is null; expected a string"),
        (
            pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"]).buffers()),
            "is not a readable parquet file",
        ),
    ],
    ids=["numbers", "bytes", "null", "no UTF-8"],
)
def test_a_parquet_column_of_another_type_is_named(
    tmp_path: Path, column: pa.Array, expected: str
) -> None:
    path = tmp_path / "examples.parquet"
    words = pa.array(["a", "b"])
    pq.write_table(pa.table({"instruction": words, "input": words, "output": column}), path)
    assert expected in str(_said(path, "alpaca"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("examples.json", DEEP, "is not valid JSON"),
        ("examples.jsonl", f'{{"a": {DEEP}', "line 1: is not valid JSON"),
        ("examples.json", "[]", "which holds no examples; at least one is needed"),
        ("examples.json", "[{}]", "example 0: field 'instruction' is missing"),
        ("examples.json", "[[]]", "example 0: is a list; expected an object"),
    ],
)
def test_what_holds_no_examples_is_named(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert expected in str(_said(path, "alpaca"))


def test_a_folder_or_device_instead_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "examples.json").mkdir()
    for path in (tmp_path, tmp_path / "examples.json", Path("/dev/null")):
        job_config = config(training__dataset="alpaca", training__dataset_path=str(path))
        told = list(example_errors(job_config))
        assert len(told) == 1
        assert f"training.dataset_path is '{path}', " in told[0]


def test_broken_rows_of_both_data_sets_end_the_launch_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_bytes(_lines([*ALPACA, {"instruction": "", "input": "", "output": "x"}]))
    other = tmp_path / "talks.jsonl"
    other.write_bytes(_lines([{"conversations": []}]))
    arguments = [
        f"--job.config_file={ROOT}/train_configs/tiny_8m.toml",
        "--training.dataset=alpaca",
        f"--training.dataset_path={path}",
        "--validation.enable",
        "--validation.dataset=sharegpt",
        f"--validation.dataset_path={other}",
        "--validation.seq_len=16",
    ]
    assert launch(arguments, local_rank=0) == 2
    printed = capsys.readouterr().out
    assert f"{path}, line 4: field 'instruction' is empty; expected a text" in printed
    assert f"{other}, line 1: " in printed
    assert not dist.is_initialized()


def test_examples_that_were_read_are_read_again_once_they_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "examples.json"
    path.write_text(json.dumps(ALPACA))
    first = read_examples(str(path), "alpaca")
    assert read_examples(str(path), "alpaca", key="validation.dataset_path") is first
    path.write_text(json.dumps(ALPACA[:2]))
    assert len(read_examples(str(path), "alpaca")) == 2
    path.write_text("[{}]")
    with pytest.raises(DataExampleError, match="example 0"):
        read_examples(str(path), "alpaca")
