"""Finds what keeps a model's weights from being loaded before any process has to try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from torchtitan.models.llama3 import llama3_args

from torchtitan.checkpoints.finished import finished_steps
from torchtitan.freezing.config import JobConfig, Model
from torchtitan.hf.flavors import FROM_FOLDER, LLAMA, chosen_args, weights_folder
from torchtitan.hf.folder import stored_tensors, tensor_errors
from torchtitan.hf.llama_args import config_of
from torchtitan.hf.llama_config import differences, read_config, read_settings

_LOADS = "checkpoint.initial_load_in_hf is true"


def model_errors(config: JobConfig) -> Iterator[str]:
    """Say what is wrong with the model that is asked for and with the folder of its weights."""
    yield from _rope_errors(config.model)
    if config.model.name != LLAMA:
        yield from _tied_elsewhere(config)
        return
    if config.model.flavor == FROM_FOLDER:
        try:
            read_config(weights_folder(config))
        except ValueError as error:
            yield f'model.flavor is "{FROM_FOLDER}", and {error}'
            return
    if config.checkpoint.initial_load_in_hf:
        yield from _loading_errors(config)


def _rope_errors(model: Model) -> Iterator[str]:
    for name in ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
        value = getattr(model, name)
        if value is not None and not 0.0 < value < math.inf:
            yield f"model.{name} is {value}; it must be above 0 and finite"
    length = model.rope_original_max_position_embeddings
    if length is not None and length < 1:
        yield f"model.rope_original_max_position_embeddings is {length}; it must be 1 or more"
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if low is not None and high is not None and low >= high:
        yield (
            f"model.rope_low_freq_factor is {low}; it must be below model.rope_high_freq_factor "
            f"({high}), or no wavelength lies in between"
        )


def _loading_errors(config: JobConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        yield f"{_LOADS}, and checkpoint.enable is false, so no weights would be loaded"
        return
    saved = Path(config.job.dump_folder) / checkpoint.folder
    if finished_steps(saved):
        return  # the run resumes, and needs the folder no more
    folder = weights_folder(config)
    try:
        found = read_config(folder)
        tensors = stored_tensors(folder)
    except ValueError as error:
        yield (
            f"{_LOADS}, and {error}; the folder is named by checkpoint.initial_load_path or, "
            "without it, model.hf_assets_path"
        )
        return
    try:
        expected = config_of(chosen_args(config, llama3_args))
    except ValueError as error:
        yield str(error)
        return
    if unlike := differences(expected, found):
        yield (
            f"{_LOADS}, and the model in {str(folder)!r} is not that of model.flavor "
            f"{config.model.flavor!r}: {'; '.join(unlike)}; choose the flavor that matches, or "
            f'model.flavor = "{FROM_FOLDER}" to take what the folder says, and leave '
            "model.vocab_size and model.rope_* unset"
        )
    for error in tensor_errors(found, tensors):
        yield f"{_LOADS}, and {str(folder)!r} does not hold what its config.json says: {error}"


def _tied_elsewhere(config: JobConfig) -> Iterator[str]:
    """Refuse tied embeddings of other models: stages cannot share a tensor."""
    folder = weights_folder(config)
    if not (config.checkpoint.enable and config.checkpoint.initial_load_in_hf and folder.is_dir()):
        return
    try:
        settings = read_settings(folder)
    except ValueError:
        return  # upstream's loader says what is wrong with the folder
    if settings.get("tie_word_embeddings"):
        yield (
            f"{_LOADS} and {str(folder)!r} has tie_word_embeddings, which this layer can load for "
            f"model.name {LLAMA!r} only: the file has no output layer of its own; use a folder "
            "saved with tie_word_embeddings = false"
        )
