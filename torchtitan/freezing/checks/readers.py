"""Finds data that gives a run no batches, by building the loaders of its first rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchtitan.protocols import train_spec as titan_spec

from torchtitan.checkpoints.finished import saved_keys, saved_values
from torchtitan.data.loader import RANK_KEY, ResizableDataloader
from torchtitan.data.named_templates import build_chat_template
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import has_rows, is_image_dataset
from torchtitan.data.sources import DataSource, training_sources, validation_sources
from torchtitan.data.validation import build_validation_loader
from torchtitan.freezing.checks.checkpoints import start_of
from torchtitan.freezing.checks.configuration import ConfigError, join_errors
from torchtitan.freezing.checks.data import validation_split
from torchtitan.freezing.checks.pipeline import data_parallel_degree
from torchtitan.freezing.config import JobConfig
from torchtitan.images.loader import build_validation_dataloader
from torchtitan.images.settings import training_place, validation_place
from torchtitan.images.sources import ImagePlace


def check_readers(job_config: JobConfig) -> None:
    """Raise if data on this disk gives no batches, or is not what the checkpoint goes on with.

    To see it, the loaders of the first rank are built; data of the hub is left to the run.

    Args:
        job_config: One without errors, its examples checked.

    Raises:
        ConfigError: Naming what is wrong, of training or else of validation.
    """
    try:
        _build_readers(job_config)
    except ValueError as error:
        raise ConfigError(join_errors([str(error)])) from error


def _build_readers(config: JobConfig) -> None:
    spec = titan_spec.get_train_spec(config.model.name)
    tokenizer = spec.build_tokenizer_fn(config) if spec.build_tokenizer_fn else None
    reader = {"dp_world_size": data_parallel_degree(config) or 1, "dp_rank": 0}
    if has_rows(config.training.dataset) and _is_here(config, training_place, training_sources):
        loader = spec.build_dataloader_fn(tokenizer=tokenizer, job_config=config, **reader)
        _require_saved_rows(config, loader)
    kind = config.validation.dataset
    if not (config.validation.enable and has_rows(kind)):
        return
    if _is_here(config, validation_place, validation_sources):
        split = validation_split(config)
        if is_image_dataset(kind):
            build_validation_dataloader(job_config=config, split=split, **reader)
            return
        # Endless, so that only the run itself looks at the length of each example.
        endless = replace(config, validation=replace(config.validation, steps=1))
        template = build_chat_template(
            config.data.chat_template, tokenizer, config.model.hf_assets_path
        )
        build_validation_loader(
            job_config=endless, tokenizer=tokenizer, split=split, template=template, **reader
        )


def _is_here(
    config: JobConfig,
    place: Callable[[JobConfig], ImagePlace],
    sources: Callable[[JobConfig], Sequence[DataSource]],
) -> bool:
    """Return whether no data that is read, pictures or examples, comes from the hub."""
    if is_image_dataset(config.training.dataset):
        return place(config).is_local
    return all(is_local_path(source.path, key=source.key) for source in sources(config))


def _require_saved_rows(config: JobConfig, loader: ResizableDataloader) -> None:
    """Refuse a checkpoint that has read other rows; other causes are told with its keys."""
    start, key = start_of(config), f"dataloader.{RANK_KEY}0"
    excluded = config.checkpoint.exclude_from_loading
    if start is not None and "dataloader" not in excluded and key in saved_keys(start.folder):
        loader.require_same(saved_values(start.folder, [key])[key])
