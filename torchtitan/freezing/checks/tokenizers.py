"""Finds tokenizers that cannot be read, or that do not fit the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan.models.llama3 import llama3_args

from timelyfreeze.files import shown
from torchtitan.data.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE, FolderTokenizer
from torchtitan.data.turns import pad_id
from torchtitan.freezing.checks.data import tokenizer_template_errors
from torchtitan.freezing.config import JobConfig, model_family
from torchtitan.hf.flavors import LLAMA, chosen_args

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
    if not (folder / TOKENIZER_FILE).is_file():
        yield (
            f"{key}, which holds no {TOKENIZER_FILE}; where transformers reads its tokenizer, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one"
        )
        return
    yield from _unusable(config, key)


def _unusable(config: JobConfig, key: str) -> Iterator[str]:
    """Say what keeps the tokenizer from being loaded, from encoding, or from serving the model."""
    folder = config.model.hf_assets_path
    try:
        tokenizer = FolderTokenizer(folder)
        ids = tokenizer.encode(_SAMPLE, add_bos=True, add_eos=True)
        tokenizer.decode(ids)
        tokens = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        filler = pad_id(tokenizer)
    # Whatever is wrong with its values: the tokenizers library raises bare exceptions, or what is
    # none of them where its own code panics; settings may be of any type.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        yield (
            f"{key}, whose tokenizer cannot be used ({TOKENIZER_FILE}, {CONFIG_FILE}): "
            f"{type(error).__name__}: {str(error)[:_MAX_CHARACTERS]}"
        )
        return
    if not ids:
        yield f"{key}, whose {TOKENIZER_FILE} makes no token of the text {_SAMPLE!r}"
        return
    largest = max([*ids, filler, *tokens.values()])
    n_embeddings = None  # of other models, and where it is not known, that is told elsewhere
    with suppress(ValueError):
        if config.model.name == LLAMA:
            n_embeddings = chosen_args(config, llama3_args).vocab_size
    if n_embeddings is not None and largest >= n_embeddings:
        name = next((token for token, i in tokens.items() if i == largest), "")
        yield (
            f"{key}, whose {TOKENIZER_FILE} has token {shown(name)} with id {largest}; "
            f"model.flavor {config.model.flavor!r} has {n_embeddings} embeddings, "
            f"so ids must be below that; set model.vocab_size to {largest + 1} or more, or choose "
            "the model's own tokenizer"
        )
    yield from tokenizer_template_errors(config, tokenizer)
