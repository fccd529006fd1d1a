"""Finds errors in how instruction data becomes sequences: chat templates and packing."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.data.examples import is_local_path, read_examples
from torchtitan.data.messages import require_messages
from torchtitan.data.named_templates import PLAIN, template_error
from torchtitan.data.turns import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.config import JobConfig


def data_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[data]`` besides its fraction: key, value and rule."""
    yield from _template_errors(config)
    if config.data.seed < 0:
        yield f"data.seed is {config.data.seed}; it must be 0 or more"
    if config.data.packing:
        yield from _packing_errors(config)


def example_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with instruction data on this disk; hub data is not looked at."""
    sections = {"training": config.training}
    if config.validation.enable:
        sections["validation"] = config.validation
    for name, section in sections.items():
        if not is_instruct_dataset(section.dataset):
            continue
        spec = INSTRUCT_DATASETS[section.dataset.lower()]
        place, key = section.dataset_path or spec.default_path, f"{name}.dataset_path"
        try:
            if is_local_path(place, key=key):
                require_messages(read_examples(place, spec.fields, key=key), spec.messages)
        except (FileNotFoundError, ValueError) as error:
            yield str(error)


def _template_errors(config: JobConfig) -> Iterator[str]:
    name = config.data.chat_template
    if message := template_error(name, config.model.hf_assets_path):
        yield message
        return
    validates = config.validation.enable and is_instruct_dataset(config.validation.dataset)
    if name != PLAIN and not is_instruct_dataset(config.training.dataset) and not validates:
        yield (
            f"data.chat_template is {name!r}, and training.dataset is "
            f"{config.training.dataset!r}; templates are for {', '.join(INSTRUCT_DATASETS)}, so it "
            f"must be {PLAIN!r}"
        )


def _packing_errors(config: JobConfig) -> Iterator[str]:
    parallelism = config.parallelism
    if not is_instruct_dataset(config.training.dataset):
        yield (
            f"data.packing is true, and training.dataset is {config.training.dataset!r}; examples can "
            f"be packed of {', '.join(INSTRUCT_DATASETS)} (upstream joins texts anyway), so it "
            "must be false"
        )
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(parallelism, key)) > 1:
            yield (
                f"data.packing is true, and parallelism.{key} is {degree}; attention within examples "
                "needs whole heads and whole sequences on a device, so it must be 1"
            )
