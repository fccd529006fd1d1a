"""Starts a training process.

Patches, configuration, checks, then upstream's main function with our trainer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from torchtitan.protocols import train_spec as titan_spec

from timelyfreeze.planning import end_with_parent
from timelyfreeze.policies import NONE
from torchtitan.checkpoints.finished import saved_keys, saved_values
from torchtitan.data.loader import RANK_KEY, ResizableDataloader
from torchtitan.data.named_templates import build_chat_template
from torchtitan.data.rows.errors import DataError
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import has_rows, is_image_dataset
from torchtitan.data.sources import DataSource, training_sources, validation_sources
from torchtitan.data.validation import build_validation_loader
from torchtitan.freezing import checks
from torchtitan.freezing.checks import (
    ConfigError,
    check_examples,
    is_done,
    join_errors,
    start_of,
    validation_split,
)
from torchtitan.freezing.checks.parallel import data_parallel_degree
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.config_file import read_config
from torchtitan.freezing.report.run_folder import last_report
from torchtitan.images.loader import build_validation_dataloader
from torchtitan.images.settings import training_place, validation_place
from torchtitan.images.sources import ImagePlace
from torchtitan.upstream import fixes as upstream_fixes

# How long a process leaves it to the first one of its host to tell of an error.
_WORD_OF_THE_FIRST_S = 60.0


def launch(args: Sequence[str], local_rank: int) -> int:
    """Parse ``args``, check them and train.

    Returns:
        The exit status: 2 if the configuration has errors, which the first process of each host
        prints, or if data cannot be used; 0 after ``--help``, and where all steps of the run are
        done.
    """
    has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if has_torchrun:
        # Killed by SIGKILL, torchrun would leave its ranks behind, training on.
        end_with_parent(os.getppid(), signal.SIGTERM)
    said = io.StringIO()
    try:
        # What parses the command line prints its errors, and --help, in every process.
        with contextlib.ExitStack() as quiet:
            if local_rank != 0:
                quiet.enter_context(contextlib.redirect_stdout(said))
                quiet.enter_context(contextlib.redirect_stderr(said))
            job_config = prepare(args)
        check_examples(job_config)
        if is_done(job_config):
            if local_rank == 0:
                print(_done_run(job_config), flush=True)
            return 0
        check_readers(job_config)
    except ConfigError as error:
        if local_rank == 0:
            print(f"error: {error}", flush=True)
        elif has_torchrun:
            _leave_to_the_first(f"error: {error}")
        return 2
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 2
        if status and local_rank != 0 and has_torchrun:
            _leave_to_the_first(said.getvalue())
        return status
    if job_config.report.quiet:
        # Upstream sets levels anew when it starts, and talks before ranks know each other.
        logging.disable(logging.INFO)
    import torchtitan.train as titan_train

    # Upstream's main function would parse the command line again, without our sections.
    titan_train.ConfigManager = lambda: SimpleNamespace(parse_args=lambda: job_config)
    try:
        titan_train.main(trainer_for(job_config))
    except DataError as error:
        # Of the hub, or of a picture that only its reading shows to be damaged; no stack says more.
        print(f"error: {error}", flush=True)
        return 2
    return 0


def trainer_for(job_config: JobConfig) -> Any:
    """Return what builds the trainer that a configuration asks for."""
    from torchtitan.freezing.elastic import ElasticRun, running_ahead
    from torchtitan.freezing.trainer import FreezingTrainer

    freezing = job_config.freezing
    if freezing.method != NONE and (freezing.elastic.enable or freezing.packing.is_on):
        return partial(ElasticRun, FreezingTrainer)
    if freezing.method != NONE and freezing.run_ahead:
        return running_ahead(FreezingTrainer)
    return FreezingTrainer


def _done_run(job_config: JobConfig) -> str:
    """Return what is said of a run that is done: at which step, and its report if it has one."""
    start, report = start_of(job_config), last_report(job_config)
    assert start is not None  # the caller saw to it
    told = (
        f"This run is done at step {start.step} (training.steps is {job_config.training.steps}, "
        f"the checkpoint {str(start.folder)!r}); with more training.steps it goes on"
    )
    return told if report is None else f"{told}\n\n{report.read_text()}\nreport: {report}"


def _leave_to_the_first(message: str) -> None:
    """Wait for torchrun to end this process, since the first one of the host ends for an error.

    Torchrun ends all processes as soon as one fails. If that were this one, the first might not
    have come to telling what is wrong. If the first finds nothing wrong, this one has to tell.
    """
    time.sleep(_WORD_OF_THE_FIRST_S)
    print(message, flush=True)


def check(args: Sequence[str]) -> None:
    """Check ``args`` as :func:`launch` does, and start nothing.

    Raises:
        ConfigError: If the configuration has errors.
        SystemExit: If an argument is wrong, which has then been said.
    """
    job_config = prepare(args)
    check_examples(job_config)
    check_readers(job_config)


def check_readers(job_config: JobConfig) -> None:
    """Raise if data on this disk gives no batches, or is not what the checkpoint goes on with.

    To see it, the loaders of the first rank are built; data of the hub is left to the run.

    Args:
        job_config: As :func:`prepare` returns it, its examples checked.

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


def prepare(args: Sequence[str]) -> JobConfig:
    """Parse and check ``args`` and register the train spec they ask for.

    After this a trainer can be built.

    Raises:
        ConfigError: If the configuration has errors.
    """
    upstream_fixes.install()
    # torchdata 0.11 calls a function that torch 2.13 has deprecated, once per process.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # Imported after the patches: it takes upstream's functions by name.
    from torchtitan.freezing.spec import build_train_spec
    from torchtitan.vision.spec import base_spec

    spelled_out = ["--report.quiet" if arg == "--quiet" else arg for arg in args]
    job_config = read_config(spelled_out, weights=True)
    name = job_config.model.name
    titan_spec._extra_train_specs.pop(name, None)
    checks.check(job_config, trains=True)
    try:
        train_spec = build_train_spec(base_spec(job_config), job_config)
    except ValueError as error:
        raise ConfigError(join_errors([str(error)])) from error
    titan_spec.register_train_spec(name, train_spec)
    return job_config
