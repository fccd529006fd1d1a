"""Errors of a configuration, found before any process group starts."""

from torchtitan.freezing.checks.checkpoints import is_done, start_of
from torchtitan.freezing.checks.configuration import check, check_data
from torchtitan.freezing.checks.data import reads_training_examples, template_of, validation_split
from torchtitan.freezing.checks.features import FEATURES, MEMORY, PROFILE, SPLIT, with_rank
from torchtitan.freezing.checks.requirements import feature_errors
from torchtitan.freezing.values.command_line import ConfigError
