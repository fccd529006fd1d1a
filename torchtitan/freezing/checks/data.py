"""Finds errors in instruction data: templates, packing, examples held out, validation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timelyfreeze.files import shown
from torchtitan.data.named_templates import build_chat_template, template_error
from torchtitan.data.rows.examples import WHOLE, is_local_path, read_examples
from torchtitan.data.rows.kinds import has_rows, is_image_dataset, is_instruct_dataset
from torchtitan.data.rows.messages import Conversation
from torchtitan.data.sequences import Template, pad_id
from torchtitan.data.sources import (
    ALL_EXAMPLES,
    MOST_REPEATS,
    ExampleSplit,
    reads_training_data,
    training_sources,
    validation_sources,
)
from torchtitan.data.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE, FolderTokenizer
from torchtitan.freezing.checks.models import reads_training_images
from torchtitan.freezing.checks.upstream import data_sections
from torchtitan.freezing.values.pipeline import n_microbatches
from torchtitan.settings import JobConfig, has_pipeline, model_family
from torchtitan.vision.spec import known_args


def data_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of ``[data]`` besides its fraction: key, value and rule."""
    for name, section in data_sections(config):
        # Such as that of a variable that is not set; upstream ignores it.
        if section.dataset_path == "" and not is_image_dataset(section.dataset):
            yield (
                f"{name}.dataset_path is ''; it must be a file, a folder or a hub name, or not be "
                f"set, for the place of {name}.dataset ({section.dataset!r}) itself"
            )
    if message := template_error(config.data.chat_template, config.model.hf_assets_path):
        yield message
    data = config.data
    try:
        sources = training_sources(config)
        validation_sources(config) if config.validation.enable else ()
    except ValueError as error:
        yield str(error)
        return
    if data.paths and config.training.dataset_path:
        yield (
            f"data.paths is {data.paths}, and training.dataset_path is "
            f"{config.training.dataset_path!r}; set one of them"
        )
    if len({(source.place, source.part) for source in sources}) < len(sources):
        yield f"data.paths is {data.paths}, which has a path twice; data.weights repeats examples"
    if not all(source.path for source in sources):
        yield f"data.paths is {data.paths}; each must be a file, a folder or a hub name"
    if not all(0 < source.weight <= MOST_REPEATS for source in sources):
        yield f"data.weights is {data.weights}; each must be above 0 and at most {MOST_REPEATS}"


def example_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of instruction data on this disk; hub data is not looked at."""
    validated = validation_sources(config) if config.validation.enable else ()
    # Such a model's rows of kind "alpaca" may have no turns; others are refused with it.
    is_cut = getattr(known_args(config), "attn_mask_type", "causal") == "block_causal"
    for source in dict.fromkeys([*training_sources(config), *validated]):
        try:
            if not is_local_path(source.path, key=source.key):
                continue
            if source.part != WHOLE:
                yield (
                    f"{source.key} has {source.path!r}, which is on this disk; data.subset, "
                    "data.split and data.revision are for data of the hub"
                )
            examples = read_examples(
                source.path, source.kind, columns=source.columns, key=source.key
            )
            for index in range(len(examples)):
                examples.read(index, _without_turns if is_cut else lambda said: said)
        except (FileNotFoundError, ValueError) as error:
            yield str(error)


def _without_turns(said: Conversation) -> None:
    if sum(message.is_answer for message in said.messages) > 1:
        raise ValueError(
            "has earlier turns (history), and model.flavor ends a document at every end token; use "
            "a flavor with attn_type 'sdpa'"
        )


def template_of(config: JobConfig, tokenizer: Any) -> Template:
    """Return the chat template of a run; ValueError if the tokenizer cannot write it."""
    return build_chat_template(config.data.chat_template, tokenizer, config.model.hf_assets_path)


def validation_split(config: JobConfig) -> ExampleSplit:
    """Return the examples of validation: those held out by training, or all."""
    fraction = config.data.validation_fraction
    if fraction > 0 and _reads_training(config):
        return ExampleSplit(fraction, held_out=True)
    return ALL_EXAMPLES


def reads_training_examples(config: JobConfig) -> bool:
    """Return whether validation reads the very examples of training."""
    return config.data.validation_fraction == 0 and _reads_training(config)


def validation_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of held-out examples and validation: key, value and rule."""
    validation, training = config.validation, config.training
    fraction = config.data.validation_fraction
    if not validation.enable:
        return
    if fraction > 0.0 and has_rows(training.dataset) and not _reads_training(config):
        yield (
            f"data.validation_fraction is {fraction}, and validation reads other data than "
            f"training (validation.dataset {validation.dataset!r}, dataset_path "
            f"{validation.dataset_path!r}; training.dataset {training.dataset!r}, dataset_path "
            f"{training.dataset_path!r}), so no one reads what is held out; set it to 0, or name "
            "the same data in both"
        )
    if validation.seq_len > training.seq_len:
        yield (
            f"validation.seq_len is {validation.seq_len}; it must be at most training.seq_len "
            f"({training.seq_len}), the length that the model is built for"
        )
    n = n_microbatches(config) if has_pipeline(config) else None
    if n and validation.local_batch_size % n:
        yield (
            f"validation.local_batch_size is {validation.local_batch_size}; a pipeline splits it "
            f"into as many microbatches as in training, so {n} (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size) must divide it"
        )


def _reads_training(config: JobConfig) -> bool:
    """Return whether validation reads training's data, or cannot be read."""
    try:
        for source in (*training_sources(config), *validation_sources(config)):
            is_local_path(source.path, key=source.key)
        return reads_training_images(config) or reads_training_data(config)
    except (ValueError, FileNotFoundError):
        return True  # told with the sources


_SAMPLE = "What is 2 + 2?\nFour."
_MAX_CHARACTERS = 300
_PANIC = "PanicException"


def tokenizer_errors(config: JobConfig) -> Iterator[str]:
    """Yield why the tokenizer of ``model.hf_assets_path`` cannot be used, if needed."""
    if not model_family(config).reads_text:
        return
    folder = Path(config.model.hf_assets_path)
    key = f"model.hf_assets_path is {str(folder)!r}"
    if not folder.is_dir():
        return  # told with the places
    if not (folder / TOKENIZER_FILE).is_file():
        yield (
            f"{key}, which holds no {TOKENIZER_FILE}; where transformers reads its tokenizer, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one"
        )
        return
    yield from _unusable(config, key)


def _unusable(config: JobConfig, key: str) -> Iterator[str]:
    """Yield obstacles to the tokenizer's loading, encoding, or use with the model."""
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
    # transformers' models learn later how many tokens they have, from a folder of their own.
    n_embeddings = getattr(known_args(config), "vocab_size", None)
    if n_embeddings is not None and largest >= n_embeddings:
        token = next((token for token, i in tokens.items() if i == largest), "")
        yield (
            f"{key}, whose {TOKENIZER_FILE} has token {shown(token)} with id {largest}; "
            f"model.flavor {config.model.flavor!r} has {n_embeddings} embeddings, "
            f"so ids must be below that; set model.vocab_size to {largest + 1} or more, or choose "
            "the model's own tokenizer"
        )
    if is_instruct_dataset(config.training.dataset):
        try:
            template_of(config, tokenizer)
        except ValueError as error:
            yield str(error)
