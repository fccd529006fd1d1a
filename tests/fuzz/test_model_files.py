"""Hugging Face folders that were cut, flipped or written wrongly: taken, or named by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.mangling import DEEP, VALUES, fuzzed, mangled_bytes, mangled_json, message_of
from torchtitan.data.chat_template import ChatTemplate, template_in_folder
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.hf.decoder import DecoderArgs
from torchtitan.hf.folder import stored_shapes
from torchtitan.hf.llama_config import read_config

SETTINGS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
HEADER = {"__metadata__": {"format": "pt"}} | {
    name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
    for i, name in enumerate(("a", "b"))
}


def safetensors(header: str) -> bytes:
    """Return a file as the format has it: length of the header, header, data."""
    data = header.encode(errors="surrogatepass")
    return len(data).to_bytes(8, "little") + data + bytes(32)


WHOLE = safetensors(json.dumps(HEADER))
INDEX = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
TOKENIZER = {"bos_token": "<s>", "chat_template": [{"name": "default", "template": "{{ 1 }}"}]}
SAID = Conversation([Message("user", "a")])


@fuzzed(60)
@given(
    data=mangled_json(SETTINGS).map(str.encode)
    | mangled_bytes(json.dumps(SETTINGS).encode())
    | st.just(DEEP.encode())
)
def test_a_broken_config_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)

    def read() -> None:
        found = read_config(tmp_path)
        assert isinstance(found, DecoderArgs)
        assert all(type(n) is int and n >= 1 for n in (found.vocab_size, found.n_layers))
        assert found.norm_eps >= 0.0
        assert found.rope_theta > 0.0
        assert found.max_seq_len >= 1
        assert found.rope_scaling_args.scaling_factor > 0.0

    message = message_of(read)
    assert message is None or str(path) in message


@fuzzed(60)
@given(
    data=mangled_json(HEADER).map(safetensors)
    | mangled_bytes(WHOLE)
    | st.just(safetensors('{"a": ' + DEEP))
)
def test_broken_weights_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)

    def read() -> None:
        for shape in stored_shapes(tmp_path).values():
            assert all(type(n) is int and n >= 0 for n in shape)

    message = message_of(read)
    assert message is None or str(path) in message


@pytest.mark.parametrize("end", [*range(0, len(WHOLE), 7), len(WHOLE) - 1])
def test_weights_that_end_early_are_refused(tmp_path: Path, end: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE[:end])
    assert str(path) in str(message_of(lambda: stored_shapes(tmp_path)))


@fuzzed(40)
@given(
    data=mangled_json(INDEX).map(str.encode)
    | mangled_bytes(json.dumps(INDEX).encode())
    | st.just(DEEP.encode())
)
def test_a_broken_index_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(data)
    message = message_of(lambda: stored_shapes(tmp_path))
    assert message is None or str(tmp_path) in message


@fuzzed(40)
@given(
    data=mangled_json(TOKENIZER).map(str.encode)
    | mangled_bytes(json.dumps(TOKENIZER).encode())
    | st.just(DEEP.encode()),
    name=st.sampled_from(["tokenizer_config.json", "chat_template.jinja"]),
)
def test_a_broken_template_is_named(tmp_path: Path, data: bytes, name: str) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    path = tmp_path / name
    path.write_bytes(data)
    message = message_of(lambda: template_in_folder(tmp_path))
    assert message is None or str(path) in message


PIECES = ["{{ ", " }}", "{% for m in messages %}", "{% endfor %}", "messages", "[9].x", "1/0"]
PIECES += ["m.content", " + ", "'a'.b.c()", "{% set a = ", " %}", "''.__class__", "raise_", " * 9"]


@fuzzed(40)
@given(
    source=st.text(max_size=20)
    | st.lists(
        st.sampled_from(PIECES),
        max_size=8,
    ).map("".join)
)
def test_a_template_that_fails_is_refused_by_name(source: str) -> None:
    message = message_of(lambda: ChatTemplate("mine", source, {}).mark(SAID))
    assert message is None or "chat template 'mine'" in message


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(999999) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_gets_no_more_than_its_share(source: str) -> None:
    message = message_of(lambda: ChatTemplate("mine", source, {}).mark(SAID))
    assert "chat template 'mine'" in str(message)


@fuzzed(25)
@given(key=st.sampled_from(sorted(SETTINGS)), value=VALUES)
def test_a_size_that_is_none_is_named_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    if not key.endswith("size") and not key.startswith("num_"):
        return
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {key: value}))
    message = message_of(lambda: read_config(tmp_path))
    if key == "num_key_value_heads" and value is None:
        assert message is None
    elif type(value) is not int or value < 1:
        # A file with half a character is told as a whole.
        assert f"{key} is " in str(message) or "half a character" in str(message)
