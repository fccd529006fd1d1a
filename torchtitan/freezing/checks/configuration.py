"""Finds errors in the configuration before any process group starts, all of them at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from timelyfreeze.settings import arguments_named
from torchtitan.freezing.checks.checkpoints import checkpoint_errors, output_errors
from torchtitan.freezing.checks.data import (
    data_errors,
    example_errors,
    tokenizer_errors,
    validation_errors,
)
from torchtitan.freezing.checks.features import FEATURES
from torchtitan.freezing.checks.freezing import freezing_errors
from torchtitan.freezing.checks.front import cache_folder_errors, front_errors
from torchtitan.freezing.checks.matrix import feature_errors
from torchtitan.freezing.checks.models import (
    device_errors,
    image_errors,
    model_errors,
    vision_errors,
)
from torchtitan.freezing.checks.pipeline import (
    parallel_errors,
    partition_errors,
    pipeline_errors,
)
from torchtitan.freezing.checks.upstream import (
    range_errors,
    text_errors,
    upstream_errors,
    with_defaults,
)
from torchtitan.freezing.config import JobConfig, toml_key
from torchtitan.freezing.report.losses import reference_errors
from torchtitan.lora.checks.section import lora_errors


class ConfigError(ValueError):
    """The configuration has errors; the message lists each with key, value and rule."""


def check(job_config: JobConfig, *, trains: bool = False) -> None:
    """Raise if the configuration cannot work.

    Args:
        job_config: What was asked for.
        trains: Whether training is about to begin here, so that what it reads and where it writes
            have to be there.

    Raises:
        ConfigError: Naming every error found.
    """
    impossible = range_errors(job_config)
    # What else is wrong is looked for with possible numbers, and nothing is told twice.
    others = _errors(with_defaults(job_config, impossible), trains=trains)
    errors = [
        *impossible.values(),
        *(error for error in others if not any(key in error for key in impossible)),
    ]
    if errors:
        raise ConfigError(join_errors(errors))


def _errors(job_config: JobConfig, *, trains: bool) -> list[str]:
    with arguments_named(toml_key):
        errors = [
            *pipeline_errors(job_config),
            *partition_errors(job_config),
            *([] if job_config.emulation.enable else parallel_errors(job_config)),
            *model_errors(job_config),
            *data_errors(job_config),
            *vision_errors(job_config),
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
                *device_errors(job_config),
                *tokenizer_errors(job_config),
                *checkpoint_errors(job_config),
                *output_errors(job_config),
                *cache_folder_errors(job_config),
            ]
    return list(dict.fromkeys(errors))  # several may meet the same


def check_examples(job_config: JobConfig) -> None:
    """Raise if the instruction data or the pictures that lie on disk cannot be used.

    All examples of instruction data are read, which the data loader then need not do again. Apart
    from :func:`check`, because not everything that needs a configuration needs its data.

    Raises:
        ConfigError: Naming the path, or the first example that is broken, of each data set.
    """
    if errors := [*example_errors(job_config), *image_errors(job_config), *text_errors(job_config)]:
        raise ConfigError(join_errors(errors))


# A value that nobody would read to its end; a path may be long.
_LONG_WORD = re.compile(r"[^\s'\",]{600,}")


def join_errors(errors: Sequence[str]) -> str:
    """Return the message of an error that tells of ``errors``, a line for each."""
    number = "an error" if len(errors) == 1 else f"{len(errors)} errors"
    lines = [
        _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} characters)", error)
        for error in errors
    ]
    return f"The configuration has {number}:\n" + "\n".join(f"  - {line}" for line in lines)
