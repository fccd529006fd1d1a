"""Finds errors in the configuration before any process group starts, all of them at once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torchtitan.protocols import train_spec as titan_spec

from torchtitan.checkpoints.finished import saved_keys, saved_values
from torchtitan.data.loader import RANK_KEY, ResizableDataloader
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import has_rows, is_image_dataset
from torchtitan.data.sources import DataSource, training_sources, validation_sources
from torchtitan.data.validation import build_validation_loader
from torchtitan.freezing.checks.checkpoints import checkpoint_errors, output_errors, start_of
from torchtitan.freezing.checks.data import (
    data_errors,
    example_errors,
    template_of,
    tokenizer_errors,
    validation_errors,
    validation_split,
)
from torchtitan.freezing.checks.features import DEVICE, FEATURES
from torchtitan.freezing.checks.freezing import lora_errors, method_errors
from torchtitan.freezing.checks.models import image_errors, model_errors
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.freezing.checks.upstream import text_errors, upstream_errors
from torchtitan.freezing.report.losses import reference_errors
from torchtitan.freezing.values.command_line import ConfigError
from torchtitan.freezing.values.errors import check_values, place_errors, value_errors
from torchtitan.freezing.values.pipeline import data_parallel_degree
from torchtitan.images.loader import build_validation_dataloader
from torchtitan.images.settings import color_errors, training_place, validation_place
from torchtitan.images.sources import ImagePlace
from torchtitan.settings import JobConfig, with_values


def check(job_config: JobConfig, *, trains: bool = False) -> None:
    """Raise ConfigError with all errors; if it ``trains``, its data and folders must be there."""
    check_values(job_config, partial(_errors, trains=trains))


def _errors(job_config: JobConfig, *, trains: bool) -> Iterator[str]:
    yield from value_errors(job_config)
    yield from model_errors(job_config)
    yield from data_errors(job_config)
    yield from color_errors(job_config)
    yield from validation_errors(job_config)
    yield from method_errors(job_config)
    yield from lora_errors(job_config)
    yield from feature_errors(job_config, FEATURES)
    yield from reference_errors(job_config)
    yield from upstream_errors(job_config)
    if trains:
        yield from feature_errors(job_config, (DEVICE,))
        yield from place_errors(job_config)
        yield from tokenizer_errors(job_config)
        yield from checkpoint_errors(job_config)
        yield from output_errors(job_config)


def check_data(job_config: JobConfig) -> None:
    """Raise ConfigError if data on this disk cannot be used, or gives the first rank no batches.

    All instruction examples are read.
    """
    if errors := [*example_errors(job_config), *image_errors(job_config), *text_errors(job_config)]:
        raise ConfigError(*errors)
    try:
        _build_readers(job_config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_readers(config: JobConfig) -> None:
    spec = titan_spec.get_train_spec(config.model.name)
    tokenizer = spec.build_tokenizer_fn(config) if spec.build_tokenizer_fn else None
    reader = {"dp_world_size": data_parallel_degree(config) or 1, "dp_rank": 0}
    if has_rows(config.training.dataset) and _is_here(config, training_place, training_sources):
        loader = spec.build_dataloader_fn(tokenizer=tokenizer, job_config=config, **reader)
        start, key = start_of(config), f"dataloader.{RANK_KEY}0"
        excluded = config.checkpoint.exclude_from_loading
        if start is not None and "dataloader" not in excluded and key in saved_keys(start.folder):
            loader.require_same(saved_values(start.folder, [key])[key])
    validation = config.validation
    if not (validation.enable and has_rows(validation.dataset)):
        return
    if _is_here(config, validation_place, validation_sources):
        build: Callable[..., ResizableDataloader] = build_validation_dataloader
        if not is_image_dataset(validation.dataset):
            template = template_of(config, tokenizer)
            build = partial(build_validation_loader, tokenizer=tokenizer, template=template)
        # Endless, so that only the run itself looks at the length of each example.
        endless = with_values(config, {"validation.steps": 1})
        build(job_config=endless, split=validation_split(config), **reader)


def _is_here(
    config: JobConfig,
    place: Callable[[JobConfig], ImagePlace],
    sources: Callable[[JobConfig], Sequence[DataSource]],
) -> bool:
    """Return whether no pictures or examples come from the hub."""
    if is_image_dataset(config.training.dataset):
        return place(config).is_local
    return all(is_local_path(source.path, key=source.key) for source in sources(config))
