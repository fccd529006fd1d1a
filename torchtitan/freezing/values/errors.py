"""All errors of values alone, of names and places among them, found without a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models

from timelyfreeze.cli.hub import is_hub_id
from timelyfreeze.settings import arguments_named
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.sources import training_sources, validation_sources
from torchtitan.freezing.values.command_line import ConfigError, read_values
from torchtitan.freezing.values.freezing import freezing_errors, front_errors
from torchtitan.freezing.values.pipeline import (
    batch_errors,
    parallel_errors,
    partition_errors,
    pipeline_errors,
)
from torchtitan.freezing.values.rules import rule_errors
from torchtitan.settings import (
    IMAGE_MODELS,
    JobConfig,
    model_family,
    toml_key,
    with_preset,
    with_values,
)

FAMILIES = (
    'a LLaMA, Mistral, Qwen2 or dense Qwen3 is model.name = "llama3", model.flavor = "hf" and '
    "model.hf_assets_path its folder"
)


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


def name_errors(config: JobConfig) -> Iterator[str]:
    """Yield an unknown name of a model."""
    known = sorted([*_supported_models, *_supported_experiments, *IMAGE_MODELS])
    if config.model.name not in known:
        yield f"model.name is {config.model.name!r}; known: {', '.join(known)}; {FAMILIES}"


def place_errors(config: JobConfig) -> Iterator[str]:
    """Yield a run's missing examples and tokenizer."""
    validated = validation_sources if config.validation.enable else training_sources
    with suppress(ValueError):  # of keys that contradict; checks of data tell
        for source in (*training_sources(config), *validated(config)):
            try:
                is_local_path(source.path, key=source.key)
            except FileNotFoundError as error:
                yield str(error)
    folder = config.model.hf_assets_path
    if model_family(config).reads_text and not (is_hub_id(folder) or Path(folder).is_dir()):
        yield (
            f"model.hf_assets_path is {str(Path(folder))!r}, which is no folder; it must hold the "
            "tokenizer"
        )
