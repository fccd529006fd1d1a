"""All errors of values alone, found before any model is imported."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from timelyfreeze.settings import arguments_named
from torchtitan.freezing.values.command_line import ConfigError, read_values
from torchtitan.freezing.values.freezing import freezing_errors, front_errors
from torchtitan.freezing.values.pipeline import (
    batch_errors,
    parallel_errors,
    partition_errors,
    pipeline_errors,
)
from torchtitan.freezing.values.places import name_errors, place_errors
from torchtitan.freezing.values.rules import rule_errors
from torchtitan.settings import JobConfig, toml_key, with_preset, with_values


def check(args: Sequence[str]) -> None:
    """Raise ConfigError with the errors of a command line and its file, without a model."""
    job_config, given = read_values(args)
    if job_config.job.custom_config_module:
        return  # may need all of TorchTitan
    check_values(with_preset(job_config, given), _early_errors)


def check_values(config: JobConfig, errors_of: Callable[[JobConfig], Iterator[str]]) -> None:
    """Raise ConfigError with broken rules of keys, and errors of a configuration without them."""
    impossible = rule_errors(config)
    usual = {key: attrgetter(key)(JobConfig()) for key in impossible}
    with arguments_named(toml_key):
        others = dict.fromkeys(errors_of(with_values(config, usual)))  # several may meet the same
    told = [error for error in others if not any(key in error for key in impossible)]
    if errors := [*impossible.values(), *told]:
        raise ConfigError(*errors)


def _early_errors(config: JobConfig) -> Iterator[str]:
    yield from value_errors(config)
    if not config.experimental.custom_import:  # which may bring models
        yield from name_errors(config)
    yield from place_errors(config)


def value_errors(config: JobConfig) -> Iterator[str]:
    """Yield contradictions between values: key, value and rule."""
    yield from pipeline_errors(config)
    yield from partition_errors(config)
    if not config.emulation.enable:
        yield from parallel_errors(config)
    yield from batch_errors(config)
    yield from freezing_errors(config)
    yield from front_errors(config)
