"""Errors of a configuration, found before any process group starts."""

from torchtitan.freezing.checks.configuration import (
    ConfigError,
    check,
    check_examples,
    join_errors,
)
from torchtitan.freezing.checks.data import reads_training_examples, validation_split
from torchtitan.freezing.checks.freezing import freeze_settings
from torchtitan.freezing.checks.parallel import compiles_blocks
from torchtitan.freezing.checks.pipeline import n_microbatches, schedule_errors, size_errors

__all__ = [
    "ConfigError",
    "check",
    "check_examples",
    "compiles_blocks",
    "freeze_settings",
    "join_errors",
    "n_microbatches",
    "reads_training_examples",
    "schedule_errors",
    "size_errors",
    "validation_split",
]
