"""Finds errors in the configuration before any process group starts, all of them at once."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from torchtitan.protocols import train_spec as titan_spec

from timelyfreeze.settings import arguments_named
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
from torchtitan.freezing.checks.freezing import freezing_errors, front_errors, lora_errors
from torchtitan.freezing.checks.models import image_errors, model_errors
from torchtitan.freezing.checks.pipeline import (
    data_parallel_degree,
    parallel_errors,
    partition_errors,
    pipeline_errors,
)
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.freezing.checks.upstream import rule_errors, text_errors, upstream_errors
from torchtitan.freezing.report.losses import reference_errors
from torchtitan.images.loader import build_validation_dataloader
from torchtitan.images.settings import color_errors, training_place, validation_place
from torchtitan.images.sources import ImagePlace
from torchtitan.settings import JobConfig, toml_key, with_values

# A value that nobody would read to its end; a path may be long.
_LONG_WORD = re.compile(r"[^\s'\",]{600,}")


class ConfigError(ValueError):
    """The configuration has errors; the message lists each with key, value and rule."""

    def __init__(self, *errors: str) -> None:
        number = "an error" if len(errors) == 1 else f"{len(errors)} errors"
        lines = [
            _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} characters)", error)
            for error in errors
        ]
        told = "\n".join(f"  - {line}" for line in lines)
        super().__init__(f"The configuration has {number}:\n{told}")


def check(job_config: JobConfig, *, trains: bool = False) -> None:
    """Raise ConfigError with all errors; if it ``trains``, its data and folders must be there."""
    impossible = rule_errors(job_config)
    # What else is wrong is looked for with possible numbers, and nothing is told twice.
    usual = {key: attrgetter(key)(JobConfig()) for key in impossible}
    others = _errors(with_values(job_config, usual), trains=trains)
    errors = [
        *impossible.values(),
        *(error for error in others if not any(key in error for key in impossible)),
    ]
    if errors:
        raise ConfigError(*errors)


def _errors(job_config: JobConfig, *, trains: bool) -> list[str]:
    with arguments_named(toml_key):
        errors = [
            *pipeline_errors(job_config),
            *partition_errors(job_config),
            *([] if job_config.emulation.enable else parallel_errors(job_config)),
            *model_errors(job_config),
            *data_errors(job_config),
            *color_errors(job_config),
            *validation_errors(job_config),
            *freezing_errors(job_config),
            *lora_errors(job_config),
            *front_errors(job_config),
            *feature_errors(job_config, FEATURES),
            *reference_errors(job_config),
            *upstream_errors(job_config),
        ]
        if trains:
            errors += [
                *feature_errors(job_config, (DEVICE,)),
                *tokenizer_errors(job_config),
                *checkpoint_errors(job_config),
                *output_errors(job_config),
            ]
    return list(dict.fromkeys(errors))  # several may meet the same


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
    """Return whether no data that is read, pictures or examples, comes from the hub."""
    if is_image_dataset(config.training.dataset):
        return place(config).is_local
    return all(is_local_path(source.path, key=source.key) for source in sources(config))
