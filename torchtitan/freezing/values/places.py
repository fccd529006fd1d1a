"""Finds unknown names of models, and folders and files missing on this disk."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models

from timelyfreeze.cli.hub import is_hub_id
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.sources import training_sources, validation_sources
from torchtitan.settings import IMAGE_MODELS, JobConfig, model_family

FAMILIES = (
    'a LLaMA, Mistral, Qwen2 or dense Qwen3 is model.name = "llama3", model.flavor = "hf" and '
    "model.hf_assets_path its folder"
)


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
