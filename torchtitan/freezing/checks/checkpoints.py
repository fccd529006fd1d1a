"""Finds obstacles to resuming a run, in this size or another, and to saving.

Weights, optimizers and instruction data go on in any number of data-parallel ranks. So does a
policy without a plan, in any pipeline, and an elastic run, which plans again; other plans only with
the same stages and microbatches.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.train_spec import get_train_spec

from timelyfreeze.control import pipeline_error, rank_keys, saved_states
from timelyfreeze.files import shown, write_obstacle
from timelyfreeze.front.caching import in_use
from timelyfreeze.policies import freezes_by_turns, makes_plan, parse_method
from torchtitan.checkpoints.finished import (
    TRAIN_STATE,
    changed_settings,
    damage,
    finished_steps,
    is_whole,
    model_only_error,
    resumable_step,
    saved_keys,
    saved_shapes,
    saved_values,
)
from torchtitan.data.rows.kinds import has_rows, is_instruct_dataset
from torchtitan.freezing.checks.freezing import adapter_errors
from torchtitan.freezing.values.freezing import caches
from torchtitan.freezing.values.pipeline import data_parallel_degree, n_microbatches
from torchtitan.lora.adapters import is_adapter
from torchtitan.settings import IMAGE_MODELS, JobConfig, adapters_half, cache_folder
from torchtitan.vision.spec import known_args

_FREEZING, _DATA = "freezing", "dataloader"
_WORLD_SIZE = f"{_DATA}.world_size"


@dataclass(frozen=True)
class Start:
    """The first checkpoint of a run; step 0 for weights alone."""

    folder: Path
    step: int


def start_of(config: JobConfig) -> Start | None:
    """Return the start in the run's own folder; None for a new run, or none possible."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return None
    finished = finished_steps(_folder(config))
    step = checkpoint.load_step if checkpoint.load_step != -1 else max(finished, default=-1)
    # After the last step nothing is left to do, whatever was kept of it.
    if step < config.training.steps and checkpoint.load_step == -1:
        whole = resumable_step(finished, checkpoint.exclude_from_loading)
        step = step if whole is None else whole
    return Start(finished[step], step) if step in finished else None


def is_done(config: JobConfig) -> bool:
    """Return whether a run has all its steps, or more, behind it."""
    start = start_of(config)
    excluded = TRAIN_STATE in config.checkpoint.exclude_from_loading
    return start is not None and not excluded and start.step >= config.training.steps


def begins_with_adapters(config: JobConfig) -> bool:
    """Return whether a run with ``lora.until`` begins, or goes on, with adapters alone."""
    start, checkpoint = start_of(config), config.checkpoint
    if start is not None and start.step > 0:
        return has_adapters(start.folder)
    initial = checkpoint.initial_load_path
    if start is None and initial and checkpoint.enable and not checkpoint.initial_load_model_only:
        return has_adapters(Path(initial))
    return True  # from weights alone


def has_adapters(folder: Path) -> bool:
    """Return whether there are adapters in a checkpoint."""
    return any(map(is_adapter, saved_shapes(folder)))


def checkpoint_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of the checkpoint at the start of a run."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    folder, start = _folder(config), start_of(config)
    if start is not None:
        yield from _start_errors(config, start)
    elif checkpoint.load_step != -1 and folder.is_dir():
        known = ", ".join(map(str, sorted(finished_steps(folder)))) or "none"
        yield (
            f"checkpoint.load_step is {checkpoint.load_step}, of which {str(folder)!r} has no "
            f"finished checkpoint; finished are: {known}"
        )
    elif checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        initial = Path(checkpoint.initial_load_path)
        problem = damage(initial) if initial.is_dir() else "it is no folder"
        if problem is None:
            model_only = checkpoint.initial_load_model_only
            yield from _content_errors(config, initial, model_only=model_only)
        else:
            yield f"checkpoint.initial_load_path is {str(initial)!r}, and {problem}"


def _folder(config: JobConfig) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def _start_errors(config: JobConfig, start: Start) -> Iterator[str]:
    if problem := damage(start.folder):
        finished = finished_steps(start.folder.parent)
        former = [s for s, f in finished.items() if s < start.step and damage(f) is None]
        resume = ""
        if former:
            resume = f"checkpoint.load_step = {max(former)} resumes from the one before, or "
        yield (
            f"the checkpoint {str(start.folder)!r} is damaged: {problem}; {resume}move the folder "
            "away"
        )
        return
    # Upstream loads no more than the model from step 0.
    how = {"model_only": start.step == 0, "is_needed": not is_done(config)}
    yield from _content_errors(config, start.folder, **how)


def _content_errors(
    config: JobConfig, folder: Path, *, model_only: bool, is_needed: bool = True
) -> Iterator[str]:
    """Yield unusable or missing content of an undamaged checkpoint."""
    if config.lora.until:
        if not model_only and (error := _half_error(config, folder)):
            yield error
            return
        if model_only or has_adapters(folder):
            config = adapters_half(config)
    wrong = [
        *weights_errors(config, folder),
        *adapter_errors(config, folder, begins_anew=model_only),
    ]
    if not (wrong or model_only):
        if is_whole(folder, config.checkpoint.exclude_from_loading):
            wrong = list(resuming_errors(config, folder) or _resize_errors(config, folder))
        elif is_needed:
            wrong = [model_only_error(folder)]
    yield from wrong


def _half_error(config: JobConfig, folder: Path) -> str | None:
    """Return why a checkpoint fits neither half of a run with ``lora.until``, None if it does."""
    until, is_anew = config.lora.until, TRAIN_STATE in config.checkpoint.exclude_from_loading
    if _STEP not in saved_keys(folder):
        return None  # it holds the model alone, which is told
    step, is_first = 0 if is_anew else saved_values(folder, [_STEP])[_STEP], has_adapters(folder)
    if step <= until if is_first else step >= until:
        return None
    has, more = ("adapters", "more") if is_first else ("no adapters", "less")
    return (
        f"lora.until is {until}, and the checkpoint {str(folder)!r} of step {step} has {has}; keep "
        f"the value that it was saved under, or name {step} or {more}"
    )


def output_errors(config: JobConfig) -> Iterator[str]:
    """Say why this process can write nothing where a run's files, checkpoints and rows go."""
    folders = {"job.dump_folder": config.job.dump_folder}
    if config.checkpoint.enable and not config.checkpoint.load_only:
        folders["checkpoint.folder"] = str(_folder(config))
    if caches(config) and config.freezing.cache.disk_gib > 0.0:
        folders["freezing.cache.folder"] = cache_folder(config)
    rank = int(os.environ.get("RANK", "0"))
    for key, folder in folders.items():
        obstacle = write_obstacle(Path(folder))
        if obstacle is None and key == "freezing.cache.folder" and in_use(Path(folder), rank):
            obstacle = f"another run uses {folder!r}"
        if obstacle is not None:
            yield f"{key} is {attrgetter(key)(config)!r}, and {obstacle}; name another folder"
            return


def _resize_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield why a run cannot go on from the complete checkpoint in ``folder``."""
    excluded, dataset = config.checkpoint.exclude_from_loading, config.training.dataset
    keys = list(saved_keys(folder))
    try:
        if freezes_by_turns(config.freezing.method) and _FREEZING not in excluded:
            yield from _freezing_errors(config, folder, keys)
        if _WORLD_SIZE in keys and _DATA not in excluded and not has_rows(dataset):
            saved = saved_values(folder, [_WORLD_SIZE])[_WORLD_SIZE]
            if (degree := data_parallel_degree(config)) not in (None, saved):
                yield (
                    f"the checkpoint {str(folder)!r} was saved with {saved} data-parallel ranks, "
                    f"and this run has {degree} (parallelism.data_parallel_replicate_degree x "
                    f"data_parallel_shard_degree); the data set {dataset!r} (training.dataset) "
                    "goes on with as many only, instruction data and pictures with any; to start "
                    f'the data again, set checkpoint.exclude_from_loading = ["{_DATA}"]'
                )
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        yield (
            f"the checkpoint {str(folder)!r} is damaged or foreign: what it says of freezing or "
            f"data cannot be read ({type(error).__name__}: {error}); checkpoint.load_step names an "
            'older one, checkpoint.exclude_from_loading = ["freezing", "dataloader"] begins again'
        )


def _freezing_errors(config: JobConfig, folder: Path, keys: list[str]) -> Iterator[str]:
    prefix = f"{_FREEZING}."
    names = rank_keys([key.removeprefix(prefix) for key in keys if key.startswith(prefix)])
    if not names:
        yield (
            f"the checkpoint {str(folder)!r} has no state for freezing.method "
            f"{config.freezing.method!r}: it was saved without freezing; resume with the same "
            "method, or, to begin freezing again, set "
            f'checkpoint.exclude_from_loading = ["{_FREEZING}"]'
        )
        return
    if not makes_plan(config.freezing.method) or config.freezing.elastic.enable:
        return
    values = saved_values(folder, [prefix + name for name in names])
    states = saved_states({key.removeprefix(prefix): text for key, text in values.items()})
    n_ranks, n = config.parallelism.pipeline_parallel_degree, n_microbatches(config)
    # Where keys contradict each other, that is reported as an error of its own.
    if n is not None and (error := pipeline_error(states, n_ranks, n)):
        yield f"{str(folder)!r}: {error}"


_STEP = "train_state.step"
_MODEL = ("model.name", "model.flavor", "model.vocab_size", "model.hf_assets_path")
_PATH = "training.dataset_path"
_ORDER = ("data.shuffle", "data.seed", "data.validation_fraction", "data.packing")
_PACKED = ("data.packing", "data.chat_template", "training.seq_len")
# A checkpoint brings them along with the state of the optimizer.
_OPTIMIZER = ("name", "beta1", "beta2", "eps", "weight_decay", "implementation")
# What times were measured under, and what a plan is for.
_PLAN = [
    "lora.until",
    "freezing.last_warmup_step",
    "freezing.last_monitor_step",
    "freezing.monitoring",
    "freezing.discard_batches",
    "freezing.max_freeze_ratio",
    "freezing.first_stage",
    "freezing.skip_input_grads",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
    "training.seq_len",
    "training.dtype",
    "training.mixed_precision_param",
    "activation_checkpoint.mode",
]

_Changes = Mapping[str, tuple[Any, Any]]


def resuming_errors(config: JobConfig, folder: Path) -> list[str]:
    """Yield keys contradicting a complete checkpoint's states, with both values."""
    found, changes = [], changed_settings(folder, config.to_dict())
    excluded = config.checkpoint.exclude_from_loading
    for states, keys in _bound_keys(config, folder, changes) if changes else ():
        wrong = [_told(key, *changes[key]) for key in keys if key in changes]
        if wrong and not set(states) <= set(excluded):
            names = ", ".join(f'"{name}"' for name in sorted({*excluded, *states}))
            found.append(
                f"{'; '.join(wrong)}: the checkpoint {str(folder)!r} goes on with the same only; "
                f"keep it, or begin that again with checkpoint.exclude_from_loading = [{names}]"
            )
    return found


def _bound_keys(
    config: JobConfig, folder: Path, changes: _Changes
) -> Iterator[tuple[Collection[str], list[str]]]:
    """Yield states of a checkpoint, and the keys to be kept for loading them."""
    yield ("optimizer", "lr_scheduler"), ["optimizer.lr", "lora.learning_rate"]
    yield ("optimizer",), [f"optimizer.{name}" for name in _OPTIMIZER]
    data = ["training.dataset"]
    then, now = changes.get(_PATH, ("", ""))
    if None in (then, now) or os.path.realpath(then) != os.path.realpath(now):
        data.append(_PATH)
    if is_instruct_dataset(config.training.dataset):
        data += _ORDER
    if config.data.packing:
        data += _PACKED
    yield ("dataloader",), data
    method = parse_method(config.freezing.method)
    if method is None:
        return
    freezing = ["freezing.method"]
    if method.policy is not None:
        freezing += [key for key in changes if key.startswith(f"freezing.{method.policy}.")]
    if method.plans:
        freezing += ["freezing.gradient_rank"] + _PLAN * _measured(config, folder, changes)
    yield ("freezing",), freezing


def _measured(config: JobConfig, folder: Path, changes: _Changes) -> bool:
    """Return whether times were measured before the checkpoint, or would have been by now."""
    key = "freezing.last_warmup_step"
    then, now = changes.get(key, (config.freezing.last_warmup_step,) * 2)
    step = saved_values(folder, [_STEP]).get(_STEP, 0) - config.lora.until
    return bool(step > min(then, now))


def _told(key: str, then: Any, now: Any) -> str:
    return f"{key} is {shown(now)} and was {shown(then)}"


def weights_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield an error for weights of another model in a checkpoint."""
    saved, wanted = saved_shapes(folder), _model_shapes(config)
    if not (saved and wanted):
        return  # Hugging Face's files, or a model that upstream alone knows how to build
    unlike = _unlike(saved, wanted)
    if unlike is None:
        return
    changes = changed_settings(folder, config.to_dict())
    keys = [_told(key, *changes[key]) for key in _MODEL if key in changes]
    yield (
        f"{'; '.join(keys) or f'model.flavor is {config.model.flavor!r}'}: the checkpoint "
        f"{str(folder)!r} belongs to another model: {unlike}; keep the model, or begin again in "
        "another checkpoint.folder"
    )


def _model_shapes(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights by name, empty if unknown."""
    args = None if config.model.name in IMAGE_MODELS else known_args(config)
    if args is None or not hasattr(args, "n_layers"):
        return {}
    args.update_from_config(config)
    with torch.device("meta"):
        weights = get_train_spec(config.model.name).model_cls(args).state_dict()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _unlike(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str | None:
    layers = [
        len({n.split(".")[1] for n in of if n.startswith("layers.")}) for of in (saved, wanted)
    ]
    if layers[0] != layers[1]:
        return f"it has {layers[0]} layers, this model {layers[1]}"
    for name, shape in wanted.items():
        if saved.get(name) != shape:
            there = f"is {list(saved[name])}" if name in saved else "is missing"
            return f"{name} {there} there, {list(shape)} in this model"
    return None
