"""Finds names and texts refused by upstream with a stack trace."""

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from torchtitan.components.quantization import float8, mx  # noqa: F401 - they register converters
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import IMAGES, INSTRUCT_DATASETS, has_rows
from torchtitan.settings import JobConfig

_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freezing")
# What lists may have.
_WORDS: Mapping[str, Collection[str]] = {
    "model.converters": _registry_model_converter_cls,
    "checkpoint.exclude_from_loading": _STATES,
}
_MAX_CHARACTERS = 300


def upstream_errors(config: JobConfig) -> Iterator[str]:
    """Yield unknown names among upstream's keys."""
    for name, section in data_sections(config) if _reads_texts(config) else ():
        if not (has_rows(section.dataset) or section.dataset in DATASETS):
            known = ", ".join([*INSTRUCT_DATASETS, IMAGES, *DATASETS])
            yield f"{name}.dataset is {section.dataset!r}; known: {known}"
    for key, words in _WORDS.items():
        for word in attrgetter(key)(config):
            if word not in words:
                yield f"{key} has {word!r}; known: {', '.join(words)}"
    if config.fault_tolerance.enable:
        yield "fault_tolerance.enable is true; this trainer has no TorchFT, so it must be false"


def data_sections(config: JobConfig) -> Iterator[tuple[str, Any]]:
    """Yield the sections with data of a run, and their names."""
    yield "training", config.training
    if config.validation.enable:
        yield "validation", config.validation


def _reads_texts(config: JobConfig) -> bool:
    """Return whether the model reads texts; others have data sets of their own."""
    try:
        return get_train_spec(config.model.name).build_dataloader_fn is build_text_dataloader
    except (ImportError, ValueError):
        return False  # told by those that check models


def text_errors(config: JobConfig) -> Iterator[str]:
    """Yield why upstream cannot read the texts on this disk; a first text is read."""
    for name, section in data_sections(config):
        if section.dataset not in DATASETS:
            continue
        texts = DATASETS[section.dataset]
        place = section.dataset_path or texts.path
        try:
            if is_local_path(place, key=f"{name}.dataset_path"):
                texts.sample_processor(next(iter(texts.loader(place))))
        # Whatever the library finds wrong with files: it raises what its parts do.
        except Exception as error:
            told = " ".join(str(error).split()) or "it is empty"
            yield (
                f"{name}.dataset is {section.dataset!r}, whose texts cannot be read from "
                f"{place!r} ({name}.dataset_path): {type(error).__name__}: {told[:_MAX_CHARACTERS]}"
            )
