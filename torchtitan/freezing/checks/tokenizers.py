"""Finds tokenizers that cannot be read, or that do not fit the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import llama3_args

from timelyfreeze.files import parse_json, shown
from torchtitan.data.named_templates import special_tokens
from torchtitan.data.turns import pad_id
from torchtitan.freezing.checks.data import tokenizer_template_errors
from torchtitan.freezing.config import JobConfig, model_family
from torchtitan.hf.flavors import LLAMA, chosen_args

# Upstream reads the first of these that is there, and the settings if they are.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
_SETTINGS = "tokenizer_config.json"
_SAMPLE = "What is 2 + 2?\nFour."
_MAX_CHARACTERS = 300
_PANIC = "PanicException"


def tokenizer_errors(config: JobConfig) -> Iterator[str]:
    """Say why the tokenizer of ``model.hf_assets_path`` cannot be used, where one is needed."""
    if not model_family(config).reads_text:
        return
    folder = Path(config.model.hf_assets_path)
    key = f"model.hf_assets_path is {str(folder)!r}"
    if not folder.is_dir():
        yield f"{key}, which is no folder; it must hold the tokenizer"
        return
    found = next((name for name in _VOCABULARIES if (folder / name).is_file()), None)
    if found is None:
        yield f"{key}, which holds no tokenizer ({', '.join(_VOCABULARIES)})"
        return
    errors = [f"{key}, and its {error}" for error in _unread(folder, found)]
    yield from errors
    if not errors:
        yield from _unusable(config, key, found)


def _unread(folder: Path, found: str) -> Iterator[str]:
    """Say which file is no JSON object, as if it were half-written."""
    for name in (found, _SETTINGS):
        path = folder / name
        if path.suffix != ".json" or not path.is_file():
            continue
        try:
            value = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            yield f"{name} cannot be read: {error}; fetch or copy it again"
            continue
        if not isinstance(value, dict):
            yield f"{name} is {type(value).__name__}; it must be an object"


def _unusable(config: JobConfig, key: str, found: str) -> Iterator[str]:
    """Say what keeps the tokenizer from being loaded, from encoding, or from serving the model."""
    folder = config.model.hf_assets_path
    try:
        tokenizer = HuggingFaceTokenizer(folder)
        ids = tokenizer.encode(_SAMPLE, add_bos=True, add_eos=True)
        tokenizer.decode(ids)
        tokens = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        special_tokens(tokenizer)
        filler = pad_id(tokenizer)
    # Whatever is wrong with its values: the tokenizers library raises bare exceptions, or what is
    # none of them where its own code panics; upstream takes settings to be of the types it expects.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        yield (
            f"{key}, whose tokenizer cannot be used ({found}, {_SETTINGS}): "
            f"{type(error).__name__}: {str(error)[:_MAX_CHARACTERS]}"
        )
        return
    if not ids:
        yield f"{key}, whose {found} makes no token of the text {_SAMPLE!r}"
        return
    largest = max([*ids, filler, *tokens.values()])
    n_embeddings = None  # of other models, and where it is not known, that is told elsewhere
    with suppress(ValueError):
        if config.model.name == LLAMA:
            n_embeddings = chosen_args(config, llama3_args).vocab_size
    if n_embeddings is not None and largest >= n_embeddings:
        name = next((token for token, i in tokens.items() if i == largest), "")
        yield (
            f"{key}, whose {found} has token {shown(name)} with id {largest}; model.flavor "
            f"{config.model.flavor!r} has {n_embeddings} embeddings, so ids must be below that; "
            f"set model.vocab_size to {largest + 1} or more, or choose the model's own tokenizer"
        )
    yield from tokenizer_template_errors(config, tokenizer)
