"""Finds what upstream refuses by itself, with a stack trace and once processes have started."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchtitan.components.quantization import float8, mx  # noqa: F401 - they register converters
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import IMAGES, INSTRUCT_DATASETS, has_rows
from torchtitan.freezing.checks.pipeline import data_parallel_degree
from torchtitan.freezing.config import JobConfig
from torchtitan.upstream.fixes import SGD

_OPTIMIZERS = ("Adam", "AdamW", SGD)
_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freezing")
_MAX_CHARACTERS = 300


def upstream_errors(config: JobConfig) -> Iterator[str]:
    """Yield which of upstream's keys do not go together, or with this machine."""
    yield from _number_errors(config)
    yield from _name_errors(config)


def _number_errors(config: JobConfig) -> Iterator[str]:
    training, parallelism, profiling = config.training, config.parallelism, config.profiling
    steps = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < steps:
        yield (
            f"profiling.profile_freq is {profiling.profile_freq}; it must be at least "
            f"profiling.profiler_warmup + profiler_active ({steps})"
        )
    degree = data_parallel_degree(config)
    rows = training.local_batch_size * (degree or 1)
    if training.global_batch_size > 0 and training.global_batch_size % rows:
        yield (
            f"training.global_batch_size is {training.global_batch_size}; it must be a multiple of "
            f"training.local_batch_size ({training.local_batch_size})"
            + (f" times the {degree} data-parallel ranks" if degree not in (None, 1) else "")
        )
    divisor = 2 * parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    if training.seq_len % divisor:
        yield (
            f"training.seq_len is {training.seq_len}; it must be a multiple of {divisor}: upstream "
            "wants 2 x parallelism.tensor_parallel_degree x context_parallel_degree"
        )
    total = config.lr_scheduler.total_steps
    if total is not None and total < training.steps:
        yield (
            f"lr_scheduler.total_steps is {total}; after that the learning rate would be below 0, "
            f"so it must be training.steps ({training.steps}) or more"
        )


def _name_errors(config: JobConfig) -> Iterator[str]:
    if config.optimizer.name not in _OPTIMIZERS:
        yield f"optimizer.name is {config.optimizer.name!r}; known: {', '.join(_OPTIMIZERS)}"
    for name, section in _sections(config) if _reads_texts(config) else ():
        if not (has_rows(section.dataset) or section.dataset in DATASETS):
            known = ", ".join([*INSTRUCT_DATASETS, IMAGES, *DATASETS])
            yield f"{name}.dataset is {section.dataset!r}; known: {known}"
    for name in config.model.converters:
        if name not in _registry_model_converter_cls:
            known = ", ".join(_registry_model_converter_cls)
            yield f"model.converters has {name!r}; known: {known}"
    if unknown := set(config.checkpoint.exclude_from_loading) - set(_STATES):
        yield (
            f"checkpoint.exclude_from_loading has {', '.join(map(repr, sorted(unknown)))}; "
            f"known: {', '.join(_STATES)}"
        )
    if config.job.save_config_file == "":
        yield 'job.save_config_file is ""; it must be the name of a file'
    name = config.experimental.custom_import
    if name and not _is_module(name):
        yield f"experimental.custom_import is {name!r}, of which there is no module"
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    is_count = option.isdecimal() and int(option) > 0
    if settings.mode == "selective" and not (option == "op" or is_count):
        yield (
            f'activation_checkpoint.selective_ac_option is {option!r}; it must be "op" or '
            "a whole number above 0"
        )
    if config.fault_tolerance.enable:
        yield "fault_tolerance.enable is true; this trainer has no TorchFT, so it must be false"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a part of its name, or a name that is none
        return False


def _sections(config: JobConfig) -> Iterator[tuple[str, Any]]:
    yield "training", config.training
    if config.validation.enable:
        yield "validation", config.validation


def _reads_texts(config: JobConfig) -> bool:
    """Return whether the model is one of texts; others have data sets of their own."""
    try:
        return get_train_spec(config.model.name).build_dataloader_fn is build_text_dataloader
    except (ImportError, ValueError):
        return False  # told by those that check models


def text_errors(config: JobConfig) -> Iterator[str]:
    """Say why upstream cannot read the texts that lie on this disk; a first one is read."""
    for name, section in _sections(config):
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


_WORD = 2**63 - 1  # torch's whole numbers
_SECONDS = 10**9  # waits are counted in nanoseconds, in 64 bits
_SIZE = 2**31 - 1  # of a batch and its sequences: more than any device holds


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, both of them or not, and others that stand for a word."""

    least: float
    most: float
    without: tuple[float, ...] = ()
    others: tuple[float, ...] = ()

    def error(self, value: float) -> str | None:
        """Return the rule that a value breaks; None if it keeps to it."""
        if value in self.others:
            return None
        others = "".join(f", or {other}" for other in self.others)
        if value < self.least or (value == self.least and value in self.without):
            bound = f"above {self.least}" if self.least in self.without else f"{self.least} or more"
            return f"it must be {bound}{others}"
        if value > self.most or (value == self.most and value in self.without):
            bound = "below" if self.most in self.without else "at most"
            return f"it must be {bound} {self.most}{others}"
        return f"it must not be {value}" if value in self.without else None


def _at_least(least: int, *others: int, most: int = _WORD) -> Range:
    return Range(least, most, (), others)


_COUNT, _FROM_ZERO = _at_least(1), _at_least(0)
_TIME, _ROWS = _at_least(1, most=_SECONDS), _at_least(1, most=_SIZE)
_SHARE = Range(0.0, 1.0)
_BETA = Range(0.0, 1.0, without=(1.0,))
_FINITE = Range(0.0, math.inf, without=(math.inf,))

RANGES: Mapping[str, Range] = {
    "profiling.profile_freq": _COUNT,
    "profiling.profiler_active": _COUNT,
    "profiling.profiler_warmup": _FROM_ZERO,
    "metrics.log_freq": _COUNT,
    "optimizer.lr": _FINITE,
    "optimizer.beta1": _BETA,
    "optimizer.beta2": _BETA,
    "optimizer.eps": _FINITE,
    "optimizer.weight_decay": _FINITE,
    "lr_scheduler.warmup_steps": _FROM_ZERO,
    "lr_scheduler.total_steps": _COUNT,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "training.local_batch_size": _ROWS,
    "training.global_batch_size": _at_least(1, -1, most=_SIZE),
    "training.seq_len": _ROWS,
    "training.max_norm": Range(0.0, math.inf, without=(0.0,)),
    "training.steps": _COUNT,
    "training.gc_freq": _COUNT,
    "training.dataloader.num_workers": _at_least(0, most=1024),
    "training.dataloader.prefetch_factor": _COUNT,
    "parallelism.data_parallel_replicate_degree": _COUNT,
    "parallelism.data_parallel_shard_degree": _at_least(1, -1),
    "parallelism.tensor_parallel_degree": _COUNT,
    "parallelism.pipeline_parallel_degree": _COUNT,
    "parallelism.pipeline_parallel_first_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_last_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_layers_per_stage": _COUNT,
    "parallelism.pipeline_parallel_microbatch_size": _ROWS,
    "parallelism.context_parallel_degree": _COUNT,
    "parallelism.expert_parallel_degree": _COUNT,
    "parallelism.expert_tensor_parallel_degree": _COUNT,
    "checkpoint.interval": _COUNT,
    "checkpoint.keep_latest_k": Range(0, _WORD, without=(1,)),
    "checkpoint.load_step": _at_least(0, -1),
    "activation_checkpoint.memory_budget": _SHARE,
    "comm.init_timeout_seconds": _TIME,
    "comm.train_timeout_seconds": _TIME,
    "comm.trace_buf_size": _at_least(0, most=10**7),
    "fault_tolerance.process_group_timeout_ms": _at_least(1, most=1000 * _SECONDS),
    "fault_tolerance.replica_id": _FROM_ZERO,
    "fault_tolerance.group_size": _FROM_ZERO,
    "fault_tolerance.min_replica_size": _COUNT,
    "validation.local_batch_size": _ROWS,
    "validation.seq_len": _ROWS,
    "validation.freq": _COUNT,
    "validation.steps": _at_least(1, -1),
    "validation.dataloader.num_workers": _at_least(0, most=1024),
    "validation.dataloader.prefetch_factor": _COUNT,
    "debug.seed": _FROM_ZERO,
    "report.device_hour_price": _FINITE,  # ours
}


def range_errors(config: JobConfig) -> dict[str, str]:
    """Return what is wrong with the numbers of upstream's keys, by key."""
    found = {}
    for key, allowed in RANGES.items():
        value = attrgetter(key)(config)
        if value is not None and (rule := allowed.error(value)):
            found[key] = f"{key} is {value}; {rule}"
    return found


def with_defaults(config: JobConfig, keys: Collection[str]) -> JobConfig:
    """Return a copy in which keys have the values that they have where nobody sets them."""
    changed = deepcopy(config)
    for key in keys:
        place, _, name = key.rpartition(".")
        section = attrgetter(place)(changed)
        setattr(section, name, getattr(type(section)(), name))
    return changed
