"""Broken tokenizers: refused by file before anything starts, or they encode as the model needs."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fuzz.mangling import DEEP, VALUES, fuzzed, mangled_bytes, mangled_json, message_of
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.data.sequences import pad_id
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.freezing.checks.data import tokenizer_errors

SETTINGS = {
    "bos_token": "<b>",
    "eos_token": {"content": "<e>", "lstrip": False},
    "pad_token": "<e>",
    "add_bos_token": False,
    "model_max_length": 100,
    "added_tokens_decoder": {"4": {"content": "<e>", "special": True}},
}
N_EMBEDDINGS = 300


def small_tokenizer() -> dict[str, Any]:
    """A tokenizer of all bytes and one merge, as its file holds it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<b>", "<e>")])
    whole: dict[str, Any] = json.loads(tokenizer.to_str())
    return whole


WHOLE = small_tokenizer()
# Most places of it are letters of the vocabulary; these are the others, and two of those.
SHORT = {**WHOLE, "model": {**WHOLE["model"], "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tokenizer.json").write_text(json.dumps(WHOLE))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    yield tmp_path
    shutil.rmtree(tmp_path)


def look(folder: Path) -> list[str]:
    """Return what is told; a tokenizer that is taken must do what a run asks of it."""
    config = make_job_config(model__hf_assets_path=str(folder), model__vocab_size=N_EMBEDDINGS)
    told: list[str] = []
    assert message_of(lambda: told.extend(tokenizer_errors(config))) is None
    for error in told:
        assert error.startswith(f"model.hf_assets_path is {str(folder)!r}")
        assert len(error) < 1500
    if not told:
        tokenizer = FolderTokenizer(str(folder))
        for text in ("ab\n", "What?", "\U0001f600 ä"):
            ids = [*tokenizer.encode(text, add_bos=True, add_eos=True), pad_id(tokenizer)]
            assert 0 <= min(ids) <= max(ids) < N_EMBEDDINGS
            assert isinstance(tokenizer.decode(ids), str)
    return told


def test_the_whole_one_is_taken(folder: Path) -> None:
    assert look(folder) == []


@fuzzed(30)
@given(
    data=mangled_json(SHORT).map(str.encode)
    | mangled_bytes(json.dumps(SHORT).encode())
    | st.just(DEEP.encode())
)
def test_a_broken_tokenizer_is_named_or_works(folder: Path, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    look(folder)


@fuzzed(30)
@given(
    data=mangled_json(SETTINGS).map(str.encode)
    | mangled_bytes(json.dumps(SETTINGS).encode())
    | st.just(DEEP.encode())
)
def test_broken_settings_are_named_or_work(folder: Path, data: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(data)
    look(folder)


@fuzzed(25)
@given(key=st.sampled_from(["a", "ab", "<new>"]), value=VALUES | st.integers(0, 1000))
def test_an_id_that_is_none_is_told(folder: Path, key: str, value: object) -> None:
    changed = {**WHOLE, "model": {**WHOLE["model"], "vocab": {**WHOLE["model"]["vocab"]}}}
    changed["model"]["vocab"][key] = value
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    is_id = type(value) is int and 0 <= value < N_EMBEDDINGS
    assert look(folder) or is_id


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_in_place_of_a_file_is_told(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert look(folder)
