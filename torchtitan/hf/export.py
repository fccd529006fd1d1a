"""Turns a checkpoint of a run into a Hugging Face folder.

The checkpoint is read by output file, so memory holds a file's weights at most. The folder may go
to the hub, with a page on data, method and figures of the run.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torchtitan.models.llama3 import llama3_args
from torchtitan.tools.logging import logger

from timelyfreeze.cli.hub import is_hub_id
from timelyfreeze.files import make_new, read_object, write_obstacle
from timelyfreeze.records.summary import RunSummary, as_shown
from torchtitan.checkpoints.finished import METADATA, chosen_step, read_run_settings
from torchtitan.data.chat_template import MORE_TEMPLATES, TEMPLATE_FILE, ChatTemplate
from torchtitan.data.named_templates import NAMED_TEMPLATES, build_chat_template
from torchtitan.data.rows.kinds import is_instruct_dataset
from torchtitan.data.text.tokenizer import FolderTokenizer
from torchtitan.hf.adapter import LlamaAdapter
from torchtitan.hf.decoder import Decoder, DecoderArgs, as_decoder
from torchtitan.hf.flavors import LLAMA, chosen_args, weights_folder
from torchtitan.hf.llama_config import (
    CONFIG_FILE,
    differences,
    parse_config,
    read_settings,
    to_settings,
)
from torchtitan.hf.weights import (
    FolderForm,
    StoredWeights,
    write_adapter,
    write_json,
    write_weights,
)
from torchtitan.settings import JobConfig, config_of_run

_SECTIONS = ("job", "metrics", "model", "checkpoint", "vision", "lora", "training", "data")
_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"


# For each ``model.name``, what makes the form of a run's checkpoint.
Forms = Mapping[str, Callable[[JobConfig, StoredWeights], FolderForm]]


def find_checkpoint(run: Path, step: int | None, names: Collection[str]) -> tuple[Path, JobConfig]:
    """Return the checkpoint of ``run`` at ``step``, or the last, of a model in ``names``."""
    try:
        settings = read_run_settings(run)
    except ValueError as error:
        raise ValueError(f"{error}; name the folder that the run's report names") from error
    job_config = config_of_run(settings, *_SECTIONS)
    _lead_home(job_config, run.resolve())
    if job_config.model.name not in names:
        raise ValueError(
            f"the run's model.name is {job_config.model.name!r}; only "
            f"{', '.join(map(repr, names))} can be exported"
        )
    _, checkpoint = chosen_step(run, settings, step)
    if not (checkpoint / METADATA).is_file():
        raise ValueError(
            f"{str(checkpoint)!r} holds safetensors already (checkpoint.last_save_in_hf)"
        )
    return checkpoint, job_config


def _lead_home(job_config: JobConfig, run: Path) -> None:
    """Let relative paths lead to the same places as from the run's start folder.

    The start folder is known if ``job.dump_folder`` is relative too, and the run was not moved.
    """
    output, places = Path(job_config.job.dump_folder), Path(job_config.metrics.save_tb_folder)
    above = len(places.parts) + len(output.parts)
    home = run.parents[above] if above < len(run.parents) and not output.is_absolute() else Path()
    for section, key in _PATHS:
        path = getattr(getattr(job_config, section), key)
        if path and (home / path).exists():
            setattr(getattr(job_config, section), key, str(home / path))


_PATHS = (("model", "hf_assets_path"), ("checkpoint", "initial_load_path"))


def export_run(
    run: Path,
    step: int | None = None,
    *,
    output: Path | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    forms: Forms | None = None,
    adapter: bool = False,
) -> Path:
    """Write the weights of a run as a folder for transformers, and return the folder.

    Adapters are merged, or with ``adapter`` written alone as a folder for peft. The folder,
    ``<run>/hf_step-<step>`` or ``adapter_step-<step>`` unless named, is written whole or not at
    all. Without ``step`` the last finished checkpoint is taken. Without ``dtype`` weights keep
    their type in the checkpoint, so that the folder computes the same as the training model.
    """
    forms = {LLAMA: llama_form} if forms is None else forms
    checkpoint, job_config = find_checkpoint(run, step, list(forms))
    folder = output or run / f"{'adapter' if adapter else 'hf'}_{checkpoint.name}"
    if folder.exists():
        raise ValueError(f"{str(folder)!r} is there already; remove it or name another folder")
    if obstacle := write_obstacle(folder):
        raise ValueError(f"the weights go to {folder}, but {obstacle}; name another with --output")
    weights = StoredWeights(checkpoint, job_config.lora.scale, dtype)
    if adapter and not weights.has_adapters:
        raise ValueError(
            f'{str(checkpoint)!r} has no adapters; runs with freezing.method "lora" have'
        )
    form = forms[job_config.model.name](job_config, weights)
    part = make_new(folder.parent, folder.name + ".part")
    try:
        if adapter:
            write_adapter(part, weights, form, job_config.lora, str(weights_folder(job_config)))
        else:
            write_weights(part, weights, form, max_file_bytes)
            write_json(part / CONFIG_FILE, form.settings(part))
            _drop_code(part)
        part.rename(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{str(folder)!r} cannot be written: {why}") from error
        raise
    return folder


def llama_form(job_config: JobConfig, weights: StoredWeights) -> FolderForm:
    """Return the form of a LLaMA; ValueError if the checkpoint or its model lacks something.

    Embeddings tied in the run's first folder stay tied if still equal, bit for bit; trained apart,
    they are written apart.
    """
    assets = Path(job_config.model.hf_assets_path)
    if not (assets.is_absolute() or assets.exists()):
        raise ValueError(
            f"model.hf_assets_path is {str(assets)!r}, which does not lead to the tokenizer from "
            "here; export in the folder in which the run was started"
        )
    args = as_decoder(chosen_args(job_config, llama3_args))
    with torch.device("meta"):
        names = list(Decoder(args).state_dict())
    weights.require(names)
    began = weights_folder(job_config)
    # A model trained from random weights may have a tokenizer's folder without a model.
    source = read_settings(began) if (began / CONFIG_FILE).is_file() else {}
    if source.get("tie_word_embeddings"):
        if torch.equal(*weights.load([_EMBEDDING, _HEAD]).values()):
            names.remove(_HEAD)
        else:
            logger.info("The output layer was trained apart from the embeddings; both are written")
    args = replace(args, tie_word_embeddings=_HEAD not in names)

    def settings(folder: Path) -> dict[str, Any]:
        said = hf_settings(args, source, weights.dtype(_EMBEDDING))
        own = Path(job_config.model.hf_assets_path)
        _copy_files(began, [GENERATION_FILE], folder)
        # Whole, and with its templates: the one that was trained with.
        _copy_files(own, (*_OF_TOKENIZER, GENERATION_FILE), folder)
        if (own / MORE_TEMPLATES).is_dir():
            shutil.copytree(own / MORE_TEMPLATES, folder / MORE_TEMPLATES)
        tokenizer = _tokenizer_of(folder)
        named = {key: value for key, value in said.items() if value is not None}
        if own.resolve() != began.resolve() and tokenizer is not None:
            named |= {"pad_token_id": tokenizer.pad_id, **known_ids(tokenizer)}
        said |= {**known_ids(tokenizer), **named}
        end = None
        if is_instruct_dataset(job_config.training.dataset):
            end = write_chat_template(folder, job_config.data.chat_template, tokenizer)
        is_other = own.resolve() != began.resolve() and not (own / GENERATION_FILE).is_file()
        write_generation_config(folder, said, end, other_ids=is_other)
        return said

    return FolderForm(names, LlamaAdapter(args, None).to_hf, settings)


def hf_settings(args: DecoderArgs, source: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    A ``source`` for the same model is kept, with token ids and keys unknown to us. Of another
    model's only the token ids are, which are the tokenizer's.
    """
    ids = {key: source[key] for key in TOKEN_IDS if key in source}
    settings = {**to_settings(args), **ids}
    with suppress(ValueError):  # which an empty source is too
        if not differences(args, parse_config(source)):
            settings = dict(source)
    settings["tie_word_embeddings"] = args.tie_word_embeddings
    return with_dtype(settings, dtype)


def with_dtype(settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of ``config.json`` with the type of the weights, for every release."""
    name = str(dtype).removeprefix("torch.")
    # Releases of transformers before 5 know the type by the second key alone.
    return {**settings, "dtype": name, "torch_dtype": name}


GENERATION_FILE = "generation_config.json"
# A tokenizer and its templates, as transformers reads them.
_OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *(TEMPLATE_FILE, "chat_template.json"),
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _drop_code(folder: Path) -> None:
    """Drop keys naming files of Python, which stay behind and would be missed."""
    for file in folder.glob("*config.json"):
        with suppress(ValueError):  # what cannot be read goes along as it is
            settings = read_object(file)
            if settings.pop("auto_map", None) is not None:
                write_json(file, settings)


def _copy_files(place: Path, names: Iterable[str], folder: Path) -> None:
    for name in names:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)


def _tokenizer_of(folder: Path) -> FolderTokenizer | None:
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
    """Write the template trained with, if not the tokenizer's; return the token ending answers."""
    if tokenizer is None:
        return None
    template = build_chat_template(name, tokenizer, str(folder))
    if not isinstance(template, ChatTemplate):
        return tokenizer.eos_id
    if template.name in NAMED_TEMPLATES:
        shutil.rmtree(folder / MORE_TEMPLATES, ignore_errors=True)
        (folder / TEMPLATE_FILE).write_text(NAMED_TEMPLATES[template.name].source)
    end = template.end_of_answer().strip()
    ids = tokenizer.tokenizer.encode(end, add_special_tokens=False).ids
    return ids[0] if len(ids) == 1 else None


def write_generation_config(
    folder: Path, config: Mapping[str, Any], end: int | None, *, other_ids: bool = False
) -> None:
    """Write the settings of generation: copied, or with the ids of ``config`` for ``other_ids``.

    A model that learned to end its answers by ``end`` would otherwise talk on, if the base model's
    settings know another token only.
    """
    path = folder / GENERATION_FILE
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    settings = read_object(path) if path.is_file() else ids
    if other_ids:
        settings = {key: v for key, v in settings.items() if key not in TOKEN_IDS} | ids
    stops = settings.get("eos_token_id")
    stops = ids.get("eos_token_id") if stops is None else stops
    stops = [stop for stop in (stops if isinstance(stops, list) else [stops]) if stop is not None]
    if end is not None:
        stops = list(dict.fromkeys([*stops, end]))
        settings["eos_token_id"] = stops if len(stops) > 1 else end
    if settings:
        write_json(path, settings)


def model_card(name: str, summary: RunSummary) -> str:
    """Return a model card; only the last part of paths is shown."""
    data = " ".join(w if is_hub_id(w) else Path(w).name for w in summary.dataset.split())
    method = f"`{summary.method}`, {summary.schedule or 'no pipeline'}"
    length = f"{summary.n_devices} processes; {summary.steps_done} of {summary.steps} steps"
    shown = as_shown(summary)
    metrics = [each.name for each in fields(summary) if each.metadata and each.name in shown]
    figures = [f"| {name.replace('_', ' ')} | {shown[name]} |" for name in metrics]
    return "\n".join(
        [
            *("---", "library_name: transformers", "tags:", "- timelyfreeze", "---", ""),
            f"# {name.rpartition('/')[2]}",
            "",
            f"- **Model**: {summary.model}",
            f"- **Data**: {data}, seed {summary.data_seed}",
            f"- **Method**: {method}, {length}",
            f"- **Machine**: {summary.device}, torch {summary.torch_version}",
            *("", "| figure | value |", "| --- | --- |", *figures, ""),
        ]
    )


def check_hub(repo: str, hub: Any) -> None:
    """Raise ValueError where a model cannot be sent to the hub, before anything is made."""
    if not is_hub_id(repo):
        raise ValueError(f"--push is {repo!r}; it must be OWNER/NAME, as on the hub")
    if hub.get_token() is None:
        raise ValueError("--push needs a token that may write; set HF_TOKEN or run hf auth login")


def push(folder: Path, card: str, repo: str, hub: Any) -> str:
    """Send a folder with its card to the hub, where a new model is private; return its address."""
    (folder / "README.md").write_text(card)
    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=folder))
    except Exception as error:  # of the hub or of the network: all have their own
        raise ValueError(
            f"{error}; {folder} is whole, so try: hf upload {repo} {folder}"
        ) from error
