"""Finds errors in instruction data: templates, packing, examples held out, validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.data.examples import is_local_path, read_examples
from torchtitan.data.messages import require_messages
from torchtitan.data.named_templates import PLAIN, build_chat_template, template_error
from torchtitan.data.split import ALL_EXAMPLES, ExampleSplit, fraction_error, is_same_data_set
from torchtitan.data.turns import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.checks.pipeline import n_microbatches, too_small
from torchtitan.freezing.config import JobConfig


def data_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[data]`` besides its fraction: key, value and rule."""
    yield from _template_errors(config)
    yield from too_small(config, "data.seed", lowest=0)
    if config.data.packing:
        yield from _packing_errors(config)


def example_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with instruction data on this disk; hub data is not looked at."""
    sections = {"training": config.training}
    if config.validation.enable:
        sections["validation"] = config.validation
    for name, section in sections.items():
        if not is_instruct_dataset(section.dataset):
            continue
        spec = INSTRUCT_DATASETS[section.dataset.lower()]
        place, key = section.dataset_path or spec.default_path, f"{name}.dataset_path"
        try:
            if is_local_path(place, key=key):
                require_messages(read_examples(place, spec.fields, key=key), spec.messages)
        except (FileNotFoundError, ValueError) as error:
            yield str(error)


def _template_errors(config: JobConfig) -> Iterator[str]:
    name = config.data.chat_template
    if message := template_error(name, config.model.hf_assets_path):
        yield message
        return
    validates = config.validation.enable and is_instruct_dataset(config.validation.dataset)
    if name != PLAIN and not is_instruct_dataset(config.training.dataset) and not validates:
        yield (
            f"data.chat_template is {name!r}, and training.dataset is "
            f"{config.training.dataset!r}; templates are for {', '.join(INSTRUCT_DATASETS)}, so it "
            f"must be {PLAIN!r}"
        )


def tokenizer_template_errors(config: JobConfig, tokenizer: Any) -> Iterator[str]:
    """Say why the chat template of the data cannot be used with this tokenizer."""
    name, folder = config.data.chat_template, config.model.hf_assets_path
    if not is_instruct_dataset(config.training.dataset) or template_error(name, folder):
        return  # not needed, or told with the data
    try:
        build_chat_template(name, tokenizer, folder)
    except ValueError as error:
        yield str(error)


def _packing_errors(config: JobConfig) -> Iterator[str]:
    parallelism = config.parallelism
    if not is_instruct_dataset(config.training.dataset):
        yield (
            f"data.packing is true, and training.dataset is {config.training.dataset!r}; examples "
            f"can be packed of {', '.join(INSTRUCT_DATASETS)} (upstream joins texts anyway), so it "
            "must be false"
        )
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(parallelism, key)) > 1:
            yield (
                f"data.packing is true, and parallelism.{key} is {degree}; attention within "
                "examples needs whole heads and whole sequences on a device, so it must be 1"
            )


def validation_split(config: JobConfig) -> ExampleSplit:
    """Return which examples of its data set validation reads: what training holds out, or all."""
    fraction = config.data.validation_fraction
    if fraction > 0 and _reads_training_data(config):
        return ExampleSplit(fraction, held_out=True)
    return ALL_EXAMPLES


def reads_training_examples(config: JobConfig) -> bool:
    """Return whether validation reads the very examples that are trained on."""
    return config.data.validation_fraction == 0 and _reads_training_data(config)


def validation_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with held-out examples and validation: key, value and rule."""
    yield from _fraction_errors(config)
    if not config.validation.enable:
        return
    validation, training = config.validation, config.training
    yield from too_small(config, "validation.freq")
    if validation.seq_len > training.seq_len:
        yield (
            f"validation.seq_len is {validation.seq_len}; it must be at most training.seq_len "
            f"({training.seq_len}), the length that the model is built for"
        )
    yield from too_small(config, "validation.local_batch_size")
    if (
        validation.local_batch_size > 0
        and config.parallelism.pipeline_parallel_degree > 1
        and (n := n_microbatches(config))
        and validation.local_batch_size % n
    ):
        yield (
            f"validation.local_batch_size is {validation.local_batch_size}; a pipeline splits it "
            f"into as many microbatches as in training, so {n} (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size) must divide it"
        )


def _fraction_errors(config: JobConfig) -> Iterator[str]:
    fraction = config.data.validation_fraction
    training, validation = config.training, config.validation
    if message := fraction_error(fraction):
        yield message
    elif fraction == 0:
        return
    elif not is_instruct_dataset(training.dataset):
        yield (
            f"data.validation_fraction is {fraction}, and training.dataset is "
            f"{training.dataset!r}; examples can be held out of {', '.join(INSTRUCT_DATASETS)}, "
            "so it must be 0"
        )
    elif validation.enable and not _reads_training_data(config):
        yield (
            f"data.validation_fraction is {fraction}, and validation reads other data than "
            f"training (validation.dataset {validation.dataset!r}, dataset_path "
            f"{validation.dataset_path!r}; training.dataset {training.dataset!r}, dataset_path "
            f"{training.dataset_path!r}), so no one reads what is held out; set it to 0, or name "
            "the same data in both"
        )


def _reads_training_data(config: JobConfig) -> bool:
    training, validation = config.training, config.validation
    return is_same_data_set(
        training.dataset, training.dataset_path, validation.dataset, validation.dataset_path
    )
