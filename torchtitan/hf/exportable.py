"""What of a run can be exported: a finished checkpoint, and the model that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.models.llama3 import llama3_args

from torchtitan.checkpoints.finished import (
    METADATA,
    checkpoint_folder,
    finished_steps,
    read_run_settings,
)
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.flavors import LLAMA, chosen_args, weights_folder
from torchtitan.hf.llama_config import CONFIG_FILE, read_settings

# What the export reads of a run's settings.
_SECTIONS = ("model", "checkpoint")


class ExportError(ValueError):
    """A run that cannot be exported as asked for."""


@dataclass(frozen=True)
class Exportable:
    """A checkpoint, and what a Hugging Face folder of it takes.

    Attributes:
        checkpoint: Folder of one step.
        job_config: The run's configuration, as far as the model and its places go.
        model_args: Upstream's description of the model.
        source: Contents of the ``config.json`` the run began from; empty if there was none.
    """

    checkpoint: Path
    job_config: JobConfig
    model_args: Any
    source: dict[str, Any]


def find_exportable(run: Path, step: int | None) -> Exportable:
    """Return the checkpoint of ``run`` at ``step``, or its last one.

    Raises:
        ExportError: If there is none, or the run's model is no LLaMA.
    """
    try:
        settings = read_run_settings(run)
        checkpoints = checkpoint_folder(run, settings)
    except ValueError as error:
        raise ExportError(f"{error}; name the folder that the run's report names") from error
    job_config = _job_config(settings)
    if job_config.model.name != LLAMA:
        raise ExportError(
            f"the run's model.name is {job_config.model.name!r}; only {LLAMA!r} can be exported"
        )
    steps = finished_steps(checkpoints)
    if not steps:
        raise ExportError(
            f"{str(checkpoints)!r} has no finished checkpoint; a run writes them with "
            "checkpoint.enable"
        )
    if step is not None and step not in steps:
        raise ExportError(
            f"{str(checkpoints)!r} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, sorted(steps)))}"
        )
    checkpoint = steps[max(steps) if step is None else step]
    if not (checkpoint / METADATA).is_file():
        raise ExportError(
            f"{str(checkpoint)!r} holds safetensors already (checkpoint.last_save_in_hf)"
        )
    folder = weights_folder(job_config)
    try:
        model_args = chosen_args(job_config, llama3_args)
        # A model trained from random weights may have a tokenizer's folder without a model.
        source = read_settings(folder) if (folder / CONFIG_FILE).is_file() else {}
    except ValueError as error:
        raise ExportError(str(error)) from error
    return Exportable(checkpoint, job_config, model_args, source)


def _job_config(settings: Mapping[str, Any]) -> JobConfig:
    job_config = JobConfig()
    for section in _SECTIONS:
        for key, value in settings[section].items():
            setattr(getattr(job_config, section), key, value)
    return job_config
