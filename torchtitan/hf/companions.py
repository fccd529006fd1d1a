"""What lies beside the weights: tokenizer, chat template, settings of generation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from timelyfreeze.files import read_object
from torchtitan.data.chat_template import TEMPLATE_FILE, ChatTemplate
from torchtitan.data.named_templates import NAMED_TEMPLATES, build_chat_template
from torchtitan.data.text.tokenizer import FolderTokenizer

GENERATION_FILE = "generation_config.json"
# What transformers reads beside config.json and the weights.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *(TEMPLATE_FILE, "chat_template.json", GENERATION_FILE),
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_companions(places: Iterable[Path], folder: Path) -> FolderTokenizer | None:
    """Copy what lies beside the weights, and return the tokenizer; None, with a warning, if none.

    Args:
        places: Where it may lie; the last one that has a file counts.
        folder: Where to.
    """
    for place in places:
        for name in _COPIED:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    try:
        return FolderTokenizer(str(folder))
    # The tokenizers library raises bare exceptions; weights are worth writing without one.
    except Exception as error:
        logger.warning("The folder gets no tokenizer that can be used: %s", str(error)[:300])
        return None


def known_ids(tokenizer: FolderTokenizer | None) -> dict[str, int]:
    """Return the ids of a tokenizer's first and last token of a text, by key of config.json."""
    ids = {name: getattr(tokenizer, name.replace("_token", ""), None) for name in TOKEN_IDS[:2]}
    return {name: value for name, value in ids.items() if value is not None}


def write_chat_template(folder: Path, name: str, tokenizer: FolderTokenizer | None) -> int | None:
    """Write the chat template that was trained with, unless it is the tokenizer's own.

    Args:
        folder: With the tokenizer's files.
        name: ``data.chat_template``.
        tokenizer: That of the folder.

    Returns:
        The token that ends an answer; None where it is no single token.
    """
    if tokenizer is None:
        return None
    template = build_chat_template(name, tokenizer, str(folder))
    if not isinstance(template, ChatTemplate):
        return None
    if template.name in NAMED_TEMPLATES:
        (folder / TEMPLATE_FILE).write_text(NAMED_TEMPLATES[template.name].source)
    end = template.end_of_answer().strip()
    ids = tokenizer.tokenizer.encode(end, add_special_tokens=False).ids
    return ids[0] if len(ids) == 1 else None


def write_generation_config(folder: Path, config: Mapping[str, Any], end: int | None) -> None:
    """Write how to generate: as copied, else with the token ids of ``config``.

    A model that learned to end its answers by ``end`` would otherwise be let talk on where the
    settings of the model it began from know another token only.

    Args:
        folder: Where to; it may have the file already.
        config: Contents of config.json.
        end: Token that ends an answer, if known.
    """
    path = folder / GENERATION_FILE
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    settings = read_object(path) if path.is_file() else ids
    stops = settings.get("eos_token_id")
    stops = ids.get("eos_token_id") if stops is None else stops
    stops = [stop for stop in (stops if isinstance(stops, list) else [stops]) if stop is not None]
    if end is not None and end not in stops:
        settings["eos_token_id"] = [*stops, end] if stops else end
    if settings:
        path.write_text(json.dumps(settings, indent=2) + "\n")
