"""Starts a training process.

Patches, configuration, checks, then upstream's main function with our trainer.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Sequence

from timelyfreeze.parent_death import end_with_parent
from torchtitan import upstream_fixes
from torchtitan.freezing.checks import ConfigError, check, check_rows, join_mistakes
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.config_file import read_config
from torchtitan.protocols import train_spec as titan_spec


def launch(args: Sequence[str], local_rank: int) -> int:
    """Parse ``args``, check them and train.

    Returns:
        The exit status: 2 if the configuration has mistakes, which the first process of each host
        prints.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Killed by SIGKILL, torchrun would leave its ranks behind, training on.
        end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        job_config = prepare(args)
        check_rows(job_config)
    except ConfigError as error:
        if local_rank == 0:
            print(f"error: {error}", flush=True)
        return 2
    if job_config.report.quiet:
        # Upstream sets levels anew when it starts, and talks before ranks know each other.
        logging.disable(logging.INFO)
    import torchtitan.train as titan_train
    from torchtitan.freezing.trainer import FreezingTrainer

    # Upstream's main function would parse the command line again, without our sections.
    titan_train.ConfigManager = lambda: _Parsed(job_config)
    titan_train.main(FreezingTrainer)
    return 0


def prepare(args: Sequence[str]) -> JobConfig:
    """Parse and check ``args`` and register the train spec they ask for.

    After this a trainer can be built.

    Raises:
        ConfigError: If the configuration has mistakes.
    """
    upstream_fixes.install()
    # torchdata 0.11 calls a function that torch 2.13 has deprecated, once per process.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # Imported after the patches: it takes upstream's functions by name.
    from torchtitan.freezing.spec import build_train_spec

    spelled_out = ["--report.quiet" if arg == "--quiet" else arg for arg in args]
    job_config = read_config(spelled_out)
    check(job_config, trains=True)
    name = job_config.model.name
    titan_spec._extra_train_specs.pop(name, None)
    try:
        train_spec = build_train_spec(titan_spec.get_train_spec(name), job_config)
    except ValueError as error:
        raise ConfigError(join_mistakes([str(error)])) from error
    titan_spec.register_train_spec(name, train_spec)
    return job_config


class _Parsed:
    """Stands in for the configuration manager of upstream's main function."""

    def __init__(self, job_config: JobConfig) -> None:
        self._job_config = job_config

    def parse_args(self) -> JobConfig:
        return self._job_config
