"""Finds a tokenizer that is missing, broken, or of another model, before processes start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import llama3_args

from timelyfreeze.files import parse_json, shown
from torchtitan.data.named_templates import build_chat_template, special_tokens, template_error
from torchtitan.data.turns import is_instruct_dataset, pad_id
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.flavors import LLAMA, chosen_args

# Upstream reads the first of these that is there, and the settings if they are.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
_SETTINGS = "tokenizer_config.json"
_SAMPLE = "What is 2 + 2?\nFour."
_MOST_CHARACTERS = 300
_PANIC = "PanicException"


def tokenizer_errors(config: JobConfig) -> Iterator[str]:
    """Say why the tokenizer of ``model.hf_assets_path`` cannot be used."""
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
            f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"
        )
        return
    if not ids:
        yield f"{key}, whose {found} makes no token of the text {_SAMPLE!r}"
        return
    largest = max([*ids, filler, *tokens.values()])
    n_examples = _n_embeddings(config)
    if n_examples is not None and largest >= n_examples:
        name = next((token for token, i in tokens.items() if i == largest), "")
        yield (
            f"{key}, whose {found} has token {shown(name)} with id {largest}; model.flavor "
            f"{config.model.flavor!r} has {n_examples} embeddings, so ids must be below that; set "
            f"model.vocab_size to {largest + 1} or more, or choose the model's own tokenizer"
        )
    yield from _no_template(config, tokenizer)


def _n_embeddings(config: JobConfig) -> int | None:
    """Return how many tokens the model knows; None where that is told elsewhere, or not known."""
    if config.model.name != LLAMA:
        return None
    try:
        return int(chosen_args(config, llama3_args).vocab_size)
    except ValueError:
        return None


def _no_template(config: JobConfig, tokenizer: HuggingFaceTokenizer) -> Iterator[str]:
    """Say why the chat template of the data cannot be used with this tokenizer."""
    name, folder = config.data.chat_template, config.model.hf_assets_path
    if not is_instruct_dataset(config.training.dataset) or template_error(name, folder):
        return  # not needed, or told with the data
    try:
        build_chat_template(name, tokenizer, folder)
    except ValueError as error:
        yield str(error)
