"""Errors of a configuration, found before any process group starts."""

from torchtitan.freezing.checks.checkpoints import is_done, start_of
from torchtitan.freezing.checks.configuration import (
    ConfigError,
    check,
    check_examples,
    check_readers,
    join_errors,
)
from torchtitan.freezing.checks.data import reads_training_examples, validation_split
from torchtitan.freezing.checks.features import FEATURES, MEMORY, PROFILE, SPLIT
from torchtitan.freezing.checks.freezing import caches, freeze_settings
from torchtitan.freezing.checks.pipeline import (
    n_microbatches,
    partition_errors,
    pipeline_errors,
    schedule_errors,
    size_errors,
)
from torchtitan.freezing.checks.requirements import feature_errors, feature_table

__all__ = [
    "FEATURES", "MEMORY", "PROFILE", "SPLIT", "ConfigError", "caches", "check", "check_examples",
    "check_readers", "feature_errors", "feature_table", "freeze_settings", "is_done",
    "join_errors", "n_microbatches", "partition_errors", "pipeline_errors",
    "reads_training_examples", "schedule_errors", "size_errors", "start_of", "validation_split",
]  # fmt: skip
