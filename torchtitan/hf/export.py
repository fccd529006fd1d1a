"""Turns a checkpoint of a run into a Hugging Face folder.

The checkpoint is read one output file at a time, so that no more than a file's worth of weights is
in memory, whatever the size of the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.llama3 import llama3_args
from torchtitan.tools.logging import logger

from timelyfreeze.files import read_object, write_obstacle
from torchtitan.checkpoints.finished import (
    METADATA,
    checkpoint_folder,
    finished_steps,
    read_run_settings,
)
from torchtitan.data.chat_template import TEMPLATE_FILE, ChatTemplate
from torchtitan.data.named_templates import NAMED_TEMPLATES, build_chat_template
from torchtitan.data.rows.kinds import is_instruct_dataset
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.adapter import Decoder, LlamaAdapter, as_decoder, config_of
from torchtitan.hf.flavors import LLAMA, chosen_args, weights_folder
from torchtitan.hf.llama_config import (
    CONFIG_FILE,
    LlamaConfig,
    differences,
    parse_config,
    read_settings,
    to_settings,
)
from torchtitan.hf.peft_folder import write_adapter
from torchtitan.hf.weights import StoredWeights

MAX_FILE_BYTES = 5 * 10**9
_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"


class ExportError(ValueError):
    """A run that cannot be exported as asked for."""


@dataclass(frozen=True)
class Exportable:
    """A checkpoint, and what a Hugging Face folder of it takes.

    Attributes:
        checkpoint: Folder of one step.
        job_config: The run's configuration, as far as the model and its places go.
        source: Contents of the ``config.json`` the run began from; empty if there was none.
        chat_template: ``data.chat_template`` of a run with instruction data, else None.
    """

    checkpoint: Path
    job_config: JobConfig
    source: dict[str, Any]
    chat_template: str | None

    @property
    def places(self) -> tuple[Path, Path]:
        """Where what belongs beside the weights may lie; the last one that has a file counts.

        A model whose weights were loaded from elsewhere may have its tokenizer in another place.
        """
        return weights_folder(self.job_config), Path(self.job_config.model.hf_assets_path)


@dataclass(frozen=True)
class FolderForm:
    """What a folder of one model is made of.

    Attributes:
        names: Tensors to write, by their names here, in the order of the files.
        translate: From names and tensors here to those in the files.
        settings: From the type of the weights, None for that of the checkpoint, to the contents of
            ``config.json``.
        write_companions: Writes into the folder what transformers reads besides; may add to the
            contents of ``config.json``.
    """

    names: Sequence[str]
    translate: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    settings: Callable[[torch.dtype | None], dict[str, Any]]
    write_companions: Callable[[Path, dict[str, Any]], None]


# For each ``model.name``, what makes the form of a checkpoint.
Forms = Mapping[str, Callable[[Exportable, StoredWeights], FolderForm]]


def find_exportable(run: Path, step: int | None, names: Collection[str]) -> Exportable:
    """Return the checkpoint of ``run`` at ``step``, or its last one.

    Raises:
        ExportError: If there is none, or the run's model has none of the ``names``.
    """
    try:
        settings = read_run_settings(run)
        checkpoints = checkpoint_folder(run, settings)
    except ValueError as error:
        raise ExportError(f"{error}; name the folder that the run's report names") from error
    job_config = _job_config(settings)
    if job_config.model.name not in names:
        raise ExportError(
            f"the run's model.name is {job_config.model.name!r}; only "
            f"{', '.join(map(repr, names))} can be exported"
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
        # A model trained from random weights may have a tokenizer's folder without a model.
        source = read_settings(folder) if (folder / CONFIG_FILE).is_file() else {}
    except ValueError as error:
        raise ExportError(str(error)) from error
    instructs = is_instruct_dataset(settings["training"]["dataset"])
    chat_template = settings["data"]["chat_template"] if instructs else None
    return Exportable(checkpoint, job_config, source, chat_template)


def _job_config(settings: Mapping[str, Any]) -> JobConfig:
    job_config = JobConfig()
    for section in ("model", "checkpoint", "vision", "lora"):
        for key, value in settings.get(section, {}).items():  # former runs lack the last two
            setattr(getattr(job_config, section), key, value)
    return job_config


def export_run(
    run: Path,
    step: int | None = None,
    *,
    output: Path | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    forms: Forms | None = None,
    adapter: bool = False,
) -> Path:
    """Write the weights of a run as a folder that transformers loads.

    Adapters are merged into them, or written alone as a folder that peft loads.

    Args:
        run: Folder of the run, as its report names it, with settings.json.
        step: Step of the checkpoint; the last finished one if None.
        output: Folder to write; ``<run>/hf_step-<step>`` if None, or ``adapter_step-<step>``.
        dtype: Type of the weights; as they lie in the checkpoint if None, so that the folder
            computes what the training model did.
        max_file_bytes: A file is closed before it would grow beyond this.
        forms: Models that can be exported; LLaMA alone if None.
        adapter: Whether to write the adapters alone.

    Returns:
        The folder, which is either whole or not there.

    Raises:
        ExportError: If the run has no such checkpoint, or no adapters where they are asked for, or
            the folder is there already.
    """
    forms = {LLAMA: llama_form} if forms is None else forms
    exportable = find_exportable(run, step, list(forms))
    kind = "adapter" if adapter else "hf"
    folder = output or run / f"{kind}_{exportable.checkpoint.name}"
    if folder.exists():
        raise ExportError(f"{str(folder)!r} is there already; remove it or name another folder")
    if obstacle := write_obstacle(folder):
        raise ExportError(f"the weights go to {folder}, but {obstacle}; name another with --output")
    lora = exportable.job_config.lora
    weights = StoredWeights(exportable.checkpoint, lora.scale)
    if adapter and not weights.has_adapters:
        raise ExportError(
            f'{str(exportable.checkpoint)!r} has no adapters; runs with freezing.method "lora" have'
        )
    form = forms[exportable.job_config.model.name](exportable, weights)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if adapter:
        base = str(weights_folder(exportable.job_config))
        write_adapter(
            part, weights, form.translate, names=form.names, lora=lora, base=base, dtype=dtype
        )
    else:
        weights.write(part, form.names, form.translate, dtype=dtype, max_file_bytes=max_file_bytes)
        settings = form.settings(dtype)
        form.write_companions(part, settings)
        (part / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        _drop_code(part)
    part.rename(folder)
    return folder


def llama_form(exportable: Exportable, weights: StoredWeights) -> FolderForm:
    """Return the form of a LLaMA.

    Embeddings that were tied in the folder the run began from stay tied if they are still equal,
    bit for bit; trained apart, they are written apart.

    Raises:
        ExportError: If the checkpoint lacks a tensor, or its model cannot be told any more.
    """
    try:
        args = chosen_args(exportable.job_config, llama3_args)
    except ValueError as error:
        raise ExportError(str(error)) from error
    with torch.device("meta"):
        names = list(Decoder(as_decoder(args)).state_dict())
    require_tensors(exportable, weights, names)
    names = _without_tied(names, exportable, weights)
    config = replace(config_of(args), tie_word_embeddings=_HEAD not in names)

    def settings(dtype: torch.dtype | None) -> dict[str, Any]:
        return hf_settings(config, exportable.source, dtype or weights.dtype(_EMBEDDING))

    companions = partial(_write_companions, exportable)
    return FolderForm(names, LlamaAdapter(args, None).to_hf, settings, companions)


def _write_companions(exportable: Exportable, folder: Path, settings: dict[str, Any]) -> None:
    """Write what lies beside the weights; ``settings`` get the token ids that they have not."""
    name = exportable.chat_template
    tokenizer = copy_companions(exportable.places, folder)
    named = {key: value for key, value in settings.items() if value is not None}
    settings.update({**known_ids(tokenizer), **named})
    end = None if name is None else write_chat_template(folder, name, tokenizer)
    write_generation_config(folder, settings, end)


def require_tensors(exportable: Exportable, weights: StoredWeights, names: Sequence[str]) -> None:
    """Raise ExportError if a checkpoint lacks one of the named tensors."""
    missing = [name for name in names if name not in weights]
    if missing:
        raise ExportError(f"{str(exportable.checkpoint)!r} lacks {missing[0]} of the run's model")


def _without_tied(names: list[str], exportable: Exportable, weights: StoredWeights) -> list[str]:
    """Return the names without that of an output layer that is still tied."""
    if exportable.source.get("tie_word_embeddings"):
        if torch.equal(*weights.load([_EMBEDDING, _HEAD]).values()):
            names.remove(_HEAD)
        else:
            logger.info("The output layer was trained apart from the embeddings; both are written")
    return names


def hf_settings(
    config: LlamaConfig, source: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Where ``source`` describes the same model it is kept, so that token ids and everything else we
    do not know of goes on. Of another model's only the token ids are, which are the tokenizer's.
    """
    settings = to_settings(config)
    if source and _describes(source, config):
        settings = dict(source)
    else:
        settings |= {key: source[key] for key in TOKEN_IDS if key in source}
    settings["tie_word_embeddings"] = config.tie_word_embeddings
    return with_dtype(settings, dtype)


def with_dtype(settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of ``config.json`` with the type of the weights, for every release."""
    settings = dict(settings)
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    # Releases of transformers before 5 know the type by this name alone.
    settings["torch_dtype"] = settings["dtype"]
    return settings


def _describes(source: Mapping[str, Any], config: LlamaConfig) -> bool:
    try:
        return not differences(config, parse_config(source))
    except ValueError:
        return False


GENERATION_FILE = "generation_config.json"
# What transformers reads beside config.json and the weights.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *(TEMPLATE_FILE, "chat_template.json", GENERATION_FILE),
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _drop_code(folder: Path) -> None:
    """Leave out what names files of Python: they stay behind, and would be missed."""
    for file in folder.glob("*config.json"):
        with suppress(ValueError):  # what cannot be read goes along as it is
            settings = read_object(file)
            if settings.pop("auto_map", None) is not None:
                file.write_text(json.dumps(settings, indent=2) + "\n")


def copy_companions(places: Iterable[Path], folder: Path) -> FolderTokenizer | None:
    """Copy what lies beside the weights, and return the tokenizer; None, with a warning, if none.

    Args:
        places: Where it may lie; the last one that has a file counts.
        folder: Where to.
    """
    for place in places:
        for name in _COPIED:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    try:
        return FolderTokenizer(str(folder))
    # The tokenizers library raises bare exceptions; weights are worth writing without one.
    except Exception as error:
        logger.warning("The folder gets no tokenizer that can be used: %s", str(error)[:300])
        return None


def known_ids(tokenizer: FolderTokenizer | None) -> dict[str, int]:
    """Return the ids of a tokenizer's first and last token of a text, by key of config.json."""
    ids = {name: getattr(tokenizer, name.replace("_token", ""), None) for name in TOKEN_IDS[:2]}
    return {name: value for name, value in ids.items() if value is not None}


def write_chat_template(folder: Path, name: str, tokenizer: FolderTokenizer | None) -> int | None:
    """Write the chat template that was trained with, unless it is the tokenizer's own.

    Args:
        folder: With the tokenizer's files.
        name: ``data.chat_template``.
        tokenizer: That of the folder.

    Returns:
        The token that ends an answer; None where it is no single token.
    """
    if tokenizer is None:
        return None
    template = build_chat_template(name, tokenizer, str(folder))
    if not isinstance(template, ChatTemplate):
        return None
    if template.name in NAMED_TEMPLATES:
        (folder / TEMPLATE_FILE).write_text(NAMED_TEMPLATES[template.name].source)
    end = template.end_of_answer().strip()
    ids = tokenizer.tokenizer.encode(end, add_special_tokens=False).ids
    return ids[0] if len(ids) == 1 else None


def write_generation_config(folder: Path, config: Mapping[str, Any], end: int | None) -> None:
    """Write how to generate: as copied, else with the token ids of ``config``.

    A model that learned to end its answers by ``end`` would otherwise be let talk on where the
    settings of the model it began from know another token only.

    Args:
        folder: Where to; it may have the file already.
        config: Contents of config.json.
        end: Token that ends an answer, if known.
    """
    path = folder / GENERATION_FILE
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    settings = read_object(path) if path.is_file() else ids
    stops = settings.get("eos_token_id")
    stops = ids.get("eos_token_id") if stops is None else stops
    stops = [stop for stop in (stops if isinstance(stops, list) else [stops]) if stop is not None]
    if end is not None and end not in stops:
        settings["eos_token_id"] = [*stops, end] if stops else end
    if settings:
        path.write_text(json.dumps(settings, indent=2) + "\n")
