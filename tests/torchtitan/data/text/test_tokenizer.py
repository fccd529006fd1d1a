"""Folders that differ in one field: ids, special tokens and text are those of AutoTokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.torchtitan.helpers.chat_tokenizers import TINY, rendered
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.rows.messages import Message
from torchtitan.data.text.tokenizer import FolderTokenizer

FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NEW = {"content": "<|x|>", "special": True, **FLAGS}
END = {"content": "<|end|>", **FLAGS}
MAP = {"bos_token": "<|begin|>", "eos_token": END, "pad_token": "<|pad|>"}
CUT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
FILL = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
FILL |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"}
JSON, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
UNNAMED = dict.fromkeys(MAP)
# What is written into which file; None takes a field, or the file, away.
FOLDERS: dict[str, dict[str, dict[str, Any] | None]] = {
    "as it is": {},
    "cut": {JSON: {"truncation": CUT}},
    "filled": {JSON: {"padding": FILL}, SETTINGS: {"pad_token": None}},
    "special tokens in their own file alone": {SETTINGS: UNNAMED, SPECIAL: MAP},
    "in both files": {SPECIAL: {"eos_token": "<|pad|>"}},
    "in a file that counts no more": {
        SETTINGS: {"added_tokens_decoder": {"2048": NEW}},
        SPECIAL: {"eos_token": "<|pad|>"},
    },
    "new ones in their own file": {
        SETTINGS: UNNAMED,
        SPECIAL: {"eos_token": "<|x|>", "additional_special_tokens": ["<|y|>"]},
    },
    "without settings": {SETTINGS: None, SPECIAL: MAP},
    "one token begins and ends": {SETTINGS: {"bos_token": "<|end|>"}},
    "added": {SETTINGS: {"added_tokens_decoder": {"2048": NEW | {"special": False}}}},
    "added in another order": {
        SETTINGS: {"added_tokens_decoder": {"2049": NEW | {"content": "<|y|>"}, "2048": NEW}}
    },
    "with other blanks": {
        SETTINGS: {"added_tokens_decoder": {"1": END | {"lstrip": True, "special": True}}}
    },
    "added in their own file": {"added_tokens.json": {"<|x|>": 2048, "<|y|>": 2049}},
    "more special ones": {SETTINGS: {"additional_special_tokens": ["<|x|>", "<|y|>"]}},
    "more, as now": {SETTINGS: {"extra_special_tokens": ["<|x|>"]}},
    "more with names": {SETTINGS: {"extra_special_tokens": {"image_token": "<|x|>"}}},
    "a name of the model's own": {SETTINGS: {"image_token": "<|x|>"}},
    "with its own blanks": {
        SETTINGS: {"eos_token": {"__type": "AddedToken", **NEW, "lstrip": True}}
    },
    "special tokens as letters": {SETTINGS: {"split_special_tokens": True}},
    "a word": {SETTINGS: {"eos_token": "the"}},
    "at most four": {SETTINGS: {"model_max_length": 4}},
}
TEXT = "Hello, the   <|end|> world<|x|>! x <|x|> y <|y|>\n\n the end and much more of it"
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ messages[0].content }}"
)


def folder_with(folder: Path, changes: dict[str, dict[str, Any] | None]) -> Path:
    shutil.copytree(TINY, folder)
    for name, change in changes.items():
        path = folder / name
        if change is None:
            path.unlink()
            continue
        known = json.loads(path.read_text()) if path.exists() else {}
        values = {key: value for key, value in (known | change).items() if value is not None}
        path.write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = folder_with(tmp_path / "t", FOLDERS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = FolderTokenizer(str(folder))
    ids = ours.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.special_tokens == theirs.special_tokens_map
    for kind in ("bos", "eos", "pad"):
        assert getattr(ours, f"{kind}_id") == getattr(theirs, f"{kind}_token_id")
    assert ours.get_vocab() == theirs.get_vocab()
    said = theirs.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    template = ChatTemplate("tokenizer", TEMPLATE, ours.special_tokens)
    assert rendered(template, [Message("user", TEXT)]) == said


def test_a_null_and_a_mark_at_the_beginning_are_not_there(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "t", {})
    settings = {"eos_token": "<|end|>", "bos_token": None, "added_tokens_decoder": None}
    (folder / SETTINGS).write_text("\ufeff" + json.dumps(settings), encoding="utf-8")
    tokenizer = FolderTokenizer(str(folder))
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)


def test_upstream_still_reads_tokenizers_otherwise(tmp_path: Path) -> None:
    both = HuggingFaceTokenizer(
        str(folder_with(tmp_path / "both", FOLDERS["one token begins and ends"]))
    )
    assert both.eos_id is None
    cut = HuggingFaceTokenizer(str(folder_with(tmp_path / "cut", FOLDERS["cut"])))
    assert len(cut.encode(TEXT)) == 4
