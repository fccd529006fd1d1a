"""Finds a tokenizer that is missing or was not written to its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torchtitan.freezing.config import JobConfig

# Upstream reads the first of these that is there, and the settings if they are.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
_SETTINGS = "tokenizer_config.json"


def tokenizer_mistakes(config: JobConfig) -> Iterator[str]:
    """Say why the tokenizer of ``model.hf_assets_path`` cannot be read."""
    folder = Path(config.model.hf_assets_path)
    key = f"model.hf_assets_path is {str(folder)!r}"
    if not folder.is_dir():
        yield f"{key}, which is no folder; it must hold the tokenizer"
        return
    found = next((name for name in _VOCABULARIES if (folder / name).is_file()), None)
    if found is None:
        yield f"{key}, which holds no tokenizer ({', '.join(_VOCABULARIES)})"
        return
    for name in (found, _SETTINGS):
        path = folder / name
        if path.suffix != ".json" or not path.is_file():
            continue
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            yield f"{key}, and its {name} cannot be read: {error}; fetch or copy it again"
            continue
        if not isinstance(value, dict):
            yield f"{key}, and its {name} is {type(value).__name__}; it must be an object"
