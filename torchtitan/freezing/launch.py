"""Starts a training process.

Patches, configuration, checks, then upstream's main function with our trainer.
"""

import contextlib
import io
import logging
import os
import signal
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan.protocols import train_spec as titan_spec
from torchtitan.tools.logging import logger

from timelyfreeze.cli.hub import fetch_model, is_hub_id
from timelyfreeze.files import FileLock
from timelyfreeze.planning import end_with_parent
from timelyfreeze.policies import freezes_by_turns
from torchtitan.checkpoints.finished import finished_steps, model_only_error, resumable_step
from torchtitan.data.rows.errors import DataError
from torchtitan.freezing import checks
from torchtitan.freezing.checks import check_data, is_done, start_of, with_rank
from torchtitan.freezing.partition.cut import check_live_times, with_partition
from torchtitan.freezing.report.run_folder import last_report
from torchtitan.freezing.values.command_line import ConfigError, read_values
from torchtitan.settings import JobConfig, with_preset
from torchtitan.upstream import fixes as upstream_fixes

# How long a process leaves it to the first one of its host to tell of an error.
_WORD_OF_THE_FIRST_S = 60.0


def launch(args: Sequence[str], local_rank: int) -> int:
    """Parse ``args``, check them and train; return the exit status.

    2 for errors of the configuration, printed by the first process of a host, or for unusable data;
    0 with nothing left to do.
    """
    has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if has_torchrun:
        # Killed by SIGKILL, torchrun would leave its ranks behind, training on.
        end_with_parent(os.getppid(), signal.SIGTERM)
    said = io.StringIO()
    try:
        # What parses the command line prints its errors, and --help, in every process, and so do
        # checks that warn of something before there is a log.
        with contextlib.ExitStack() as quiet:
            if local_rank != 0:
                quiet.enter_context(contextlib.redirect_stdout(said))
                quiet.enter_context(contextlib.redirect_stderr(said))
            job_config = prepare(args)
            if is_done(job_config):
                if local_rank == 0:
                    print(_done_run(job_config), flush=True)
                return 0
            check_data(job_config)
            lock = hold_checkpoints(job_config)
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
        # Upstream sets levels again when it starts, and talks before ranks know each other.
        logging.disable(logging.INFO)
    import torchtitan.train as titan_train

    # Upstream's main function would parse the command line again, without our sections.
    titan_train.ConfigManager = lambda: SimpleNamespace(parse_args=lambda: job_config)  # type: ignore[assignment,misc]
    try:
        with lock:
            titan_train.main(trainer_for(job_config))
    except DataError as error:
        # Of the hub, or of a picture that only its reading shows to be damaged; no stack says more.
        print(f"error: {error}", flush=True)
        return 2
    return 0


def hold_checkpoints(job_config: JobConfig) -> contextlib.AbstractContextManager[object]:
    """Lock the run's checkpoints against other runs, by its first process, until its end."""
    checkpoint, folder = job_config.checkpoint, job_config.job.dump_folder
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first or not checkpoint.enable or checkpoint.load_only:
        return contextlib.nullcontext()
    place = Path(folder) / checkpoint.folder
    try:
        return contextlib.closing(FileLock(place.with_name(f"{place.name}.lock")))
    except BlockingIOError:
        raise ConfigError(
            f"job.dump_folder is {folder!r}, where another run is saving its checkpoints; wait for "
            "its end to go on with it, or name another folder"
        ) from None
    except OSError as error:
        logger.warning(
            f"{place} cannot be locked ({error.strerror}): a second run there would overwrite its "
            "checkpoints"
        )
        return contextlib.nullcontext()


def trainer_for(job_config: JobConfig) -> Any:
    """Return the builder of a configuration's trainer."""
    from torchtitan.freezing.elastic.adapters import AdaptersFirst
    from torchtitan.freezing.elastic.ahead import RunningAhead
    from torchtitan.freezing.elastic.packing import GivingBack
    from torchtitan.freezing.elastic.part import SharedRun
    from torchtitan.freezing.elastic.run import ElasticRun
    from torchtitan.freezing.spec import register_spec
    from torchtitan.freezing.trainer import FreezingTrainer

    freezing = job_config.freezing
    if job_config.lora.until and not job_config.checkpoint.create_seed_checkpoint:
        return partial(AdaptersFirst, FreezingTrainer, register_spec)
    if not freezes_by_turns(freezing.method):
        return FreezingTrainer
    if freezing.packing.gives_back:
        return partial(FreezingTrainer, run=SharedRun([GivingBack(job_config)]))
    if freezing.elastic.enable or freezing.packing.is_on:
        return partial(ElasticRun, FreezingTrainer)
    if freezing.run_ahead:
        return partial(FreezingTrainer, run=SharedRun([RunningAhead()]))
    return FreezingTrainer


def _done_run(job_config: JobConfig) -> str:
    """Return the text on a finished run: its step, and its report if any."""
    start, report = start_of(job_config), last_report(job_config)
    assert start is not None  # since the run is done
    excluded = job_config.checkpoint.exclude_from_loading
    step = resumable_step(finished_steps(start.folder.parent), excluded)
    more = "with more training.steps it goes on"
    more += "" if step == start.step else f" from step {step}"
    if step is None:
        more = model_only_error(start.folder)
    told = (
        f"This run is done at step {start.step} (training.steps is {job_config.training.steps}, "
        f"the checkpoint {str(start.folder)!r}); {more}"
    )
    if report is None:
        return f"{told}; it ended before its report was written"
    return f"{told}\n\n{report.read_text()}\nreport: {report}"


def _leave_to_the_first(message: str) -> None:
    """Wait for torchrun to end this process, so that the host's first process tells the error.

    Torchrun ends all processes as soon as one fails. If the first finds no fault, this process
    tells.
    """
    time.sleep(_WORD_OF_THE_FIRST_S)
    print(message, flush=True)


def check(args: Sequence[str]) -> None:
    """Check ``args`` as :func:`launch` does, and start nothing; errors are a ConfigError."""
    check_data(prepare(args))


def prepare(args: Sequence[str]) -> JobConfig:
    """Parse and check ``args``, and register the trainer's train spec."""
    upstream_fixes.install()
    # torchdata 0.11 calls a function that torch 2.13 has deprecated, once per process.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # Imported after the patches: it takes upstream's functions by name.
    from torchtitan.freezing.elastic.packing import present_config
    from torchtitan.freezing.spec import register_spec

    job_config = present_config(read_config(args, weights=True))
    titan_spec._extra_train_specs.pop(job_config.model.name, None)
    checks.check(job_config, trains=True)
    try:
        register_spec(job_config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return job_config


def read_config(args: Sequence[str], *, weights: bool = False) -> JobConfig:
    """Return the configuration of ``args`` and of their TOML file.

    A model named by its id on the hub is fetched, if its folder is not there yet, with ``weights``
    too, should the run begin from them. A ConfigError names every wrong key.
    """
    job_config, given = read_values(args)
    try:
        model, checkpoint = job_config.model, job_config.checkpoint
        if is_hub_id(model.hf_assets_path):
            weights &= checkpoint.initial_load_in_hf and not checkpoint.initial_load_path
            model.hf_assets_path = fetch_model(model.hf_assets_path, weights=weights)
        job_config = with_rank(with_partition(with_preset(job_config, given)))
        check_live_times(job_config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return job_config
