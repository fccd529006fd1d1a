"""Finds errors in ``[validation]`` and in the fraction of examples that is held out for it."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.data.split import ALL_EXAMPLES, ExampleSplit, fraction_error, is_same_data_set
from torchtitan.data.turns import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.config import JobConfig


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
    if validation.freq < 1:
        yield f"validation.freq is {validation.freq}; it must be 1 or more"
    if validation.seq_len > training.seq_len:
        yield (
            f"validation.seq_len is {validation.seq_len}; it must be at most training.seq_len "
            f"({training.seq_len}), the length that the model is built for"
        )
    if validation.local_batch_size < 1:
        yield f"validation.local_batch_size is {validation.local_batch_size}; it must be 1 or more"
    elif (n := _n_microbatches(config)) and validation.local_batch_size % n:
        yield (
            f"validation.local_batch_size is {validation.local_batch_size}; a pipeline splits it "
            f"into as many microbatches as in training, so {n} (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size) must divide it"
        )


def _fraction_errors(config: JobConfig) -> Iterator[str]:
    fraction, training, validation = (
        config.data.validation_fraction,
        config.training,
        config.validation,
    )
    if message := fraction_error(fraction):
        yield message
    elif fraction == 0:
        return
    elif not is_instruct_dataset(training.dataset):
        yield (
            f"data.validation_fraction is {fraction}, and training.dataset is {training.dataset!r}; "
            f"examples can be held out of {', '.join(INSTRUCT_DATASETS)}, so it must be 0"
        )
    elif validation.enable and not _reads_training_data(config):
        yield (
            f"data.validation_fraction is {fraction}, and validation reads other data than training "
            f"(validation.dataset {validation.dataset!r}, dataset_path "
            f"{validation.dataset_path!r}; training.dataset {training.dataset!r}, dataset_path "
            f"{training.dataset_path!r}), so no one reads what is held out; set it to 0, or name "
            "the same data in both"
        )


def _reads_training_data(config: JobConfig) -> bool:
    training, validation = config.training, config.validation
    return is_same_data_set(
        training.dataset, training.dataset_path, validation.dataset, validation.dataset_path
    )


def _n_microbatches(config: JobConfig) -> int | None:
    """Return the number of microbatches of a pipeline batch; None without or where keys clash."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    n_examples = config.training.local_batch_size
    if config.parallelism.pipeline_parallel_degree <= 1 or size < 1 or n_examples % size:
        return None
    return n_examples // size
