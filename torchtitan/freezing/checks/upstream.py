"""Finds values that break the rule of their key, and what upstream refuses with a stack trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from torchtitan.components.quantization import float8, mx  # noqa: F401 - they register converters
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from timelyfreeze.files import MOST, OneOf, Within
from torchtitan.data.rows.examples import is_local_path
from torchtitan.data.rows.kinds import IMAGES, INSTRUCT_DATASETS, has_rows
from torchtitan.freezing.checks.pipeline import (
    data_parallel_degree,
    microbatch_errors,
    schedule_errors,
)
from torchtitan.freezing.config import JobConfig
from torchtitan.images.transforms import AUGMENTATIONS
from torchtitan.upstream.fixes import SGD

_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freezing")
# What lists may have.
_WORDS: Mapping[str, Collection[str]] = {
    "model.converters": _registry_model_converter_cls,
    "checkpoint.exclude_from_loading": _STATES,
}
_MAX_CHARACTERS = 300


def upstream_errors(config: JobConfig) -> Iterator[str]:
    """Yield which of upstream's keys do not go together, or with this machine."""
    training, parallelism = config.training, config.parallelism
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
    """Yield the sections that name data which a run reads, with their names."""
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


_COUNT, _FROM_ZERO = Within(1, MOST), Within(0, MOST)
_TIME = Within(1, 10**9)  # seconds, which are counted in nanoseconds, in 64 bits
_WORKERS = Within(0, 1024)
_SHARE, _PART = Within(0.0, 1.0), Within(0.0, 1.0, below=True)
_FINITE, _POSITIVE = Within(0.0), Within(0.0, above=True)

RULES: Mapping[str, Within | OneOf] = {
    "profiling.profile_freq": _COUNT,
    "profiling.profiler_active": _COUNT,
    "profiling.profiler_warmup": _FROM_ZERO,
    "metrics.log_freq": _COUNT,
    "optimizer.lr": _FINITE,
    "optimizer.beta1": _PART,
    "optimizer.beta2": _PART,
    "optimizer.eps": _FINITE,
    "optimizer.weight_decay": _FINITE,
    "lr_scheduler.warmup_steps": _FROM_ZERO,
    "lr_scheduler.total_steps": _COUNT,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "training.local_batch_size": _COUNT,
    "training.global_batch_size": Within(-1, MOST),
    "training.seq_len": _COUNT,
    "training.max_norm": Within(0.0, above=True, or_odd=True),
    "training.steps": _COUNT,
    "training.gc_freq": _COUNT,
    "training.dataloader.num_workers": _WORKERS,
    "training.dataloader.prefetch_factor": _COUNT,
    "parallelism.data_parallel_replicate_degree": _COUNT,
    "parallelism.data_parallel_shard_degree": Within(-1, MOST),
    "parallelism.tensor_parallel_degree": _COUNT,
    "parallelism.pipeline_parallel_degree": _COUNT,
    "parallelism.pipeline_parallel_first_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_last_stage_less_layers": _FROM_ZERO,
    "parallelism.pipeline_parallel_layers_per_stage": _COUNT,
    "parallelism.pipeline_parallel_microbatch_size": _COUNT,
    "parallelism.context_parallel_degree": _COUNT,
    "parallelism.expert_parallel_degree": _COUNT,
    "parallelism.expert_tensor_parallel_degree": _COUNT,
    "checkpoint.interval": _COUNT,
    "checkpoint.keep_latest_k": _FROM_ZERO,
    "checkpoint.load_step": Within(-1, MOST),
    "activation_checkpoint.memory_budget": _SHARE,
    "comm.init_timeout_seconds": _TIME,
    "comm.train_timeout_seconds": _TIME,
    "comm.trace_buf_size": Within(0, 10**7),
    "fault_tolerance.process_group_timeout_ms": Within(1, 10**12),
    "fault_tolerance.replica_id": _FROM_ZERO,
    "fault_tolerance.group_size": _FROM_ZERO,
    "fault_tolerance.min_replica_size": _COUNT,
    "validation.local_batch_size": _COUNT,
    "validation.seq_len": _COUNT,
    "validation.freq": _COUNT,
    "validation.steps": Within(-1, MOST),
    "validation.dataloader.num_workers": _WORKERS,
    "validation.dataloader.prefetch_factor": _COUNT,
    "debug.seed": _FROM_ZERO,
    "optimizer.name": OneOf("Adam", "AdamW", SGD),
    # -- ours
    "report.device_hour_price": _FINITE,
    "vision.image_size": Within(1),
    "vision.classes": Within(0),
    "vision.augmentation": OneOf(*AUGMENTATIONS),
    "vision.mixup": _FINITE,
    "vision.label_smoothing": _PART,
    "model.vocab_size": Within(1),
    "model.rope_scaling_factor": _POSITIVE,
    "model.rope_low_freq_factor": _POSITIVE,
    "model.rope_high_freq_factor": _POSITIVE,
    "model.rope_original_max_position_embeddings": Within(1),
    "data.seed": Within(0),
    "data.validation_fraction": _PART,
    "lora.rank": Within(1),
    "lora.alpha": _POSITIVE,
    "lora.learning_rate": _POSITIVE,
}
# Upstream wants two at least, or all; elsewhere -1 stands for a word.
_NEVER = {
    "checkpoint.keep_latest_k": 1,
    "training.global_batch_size": 0,
    "parallelism.data_parallel_shard_degree": 0,
    "validation.steps": 0,
}


def rule_errors(config: JobConfig) -> dict[str, str]:
    """Return which numbers and words break the rule of their key alone, by key."""
    found = {}
    for key, allowed in RULES.items():
        if (value := attrgetter(key)(config)) is None:
            continue
        rule = allowed.error(value)
        if value == _NEVER.get(key):
            rule = f"it must not be {value}"
        if rule:
            found[key] = f"{key} is {value!r}; {rule}"
    return found


def size_errors(config: JobConfig) -> Iterator[str]:
    """Yield which values are impossible, or make no pipeline that anyone could run."""
    yield from (impossible := rule_errors(config)).values()
    if not impossible and config.parallelism.pipeline_parallel_degree > 1:
        yield from schedule_errors(config)
        yield from microbatch_errors(config)
