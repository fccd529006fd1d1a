"""Finds values that break the rule of their key, and what upstream refuses with a stack trace."""

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
from torchtitan.freezing.checks.pipeline import data_parallel_degree, pipeline_errors
from torchtitan.images.transforms import AUGMENTATIONS
from torchtitan.settings import JobConfig
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


_SHARE, _PART = Within(0.0, 1.0), Within(0.0, 1.0, below=True)
# Each rule, and the keys that have to keep to it.
_KEYS: Mapping[Within | OneOf, str] = {
    Within(1, MOST): """
        profiling.profile_freq profiling.profiler_active metrics.log_freq lr_scheduler.total_steps
        training.local_batch_size training.seq_len training.steps training.gc_freq
        training.dataloader.prefetch_factor
        parallelism.data_parallel_replicate_degree parallelism.tensor_parallel_degree
        parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_layers_per_stage
        parallelism.pipeline_parallel_microbatch_size parallelism.context_parallel_degree
        parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree
        checkpoint.interval fault_tolerance.min_replica_size
        validation.local_batch_size validation.seq_len validation.freq
        validation.dataloader.prefetch_factor""",
    Within(0, MOST): """
        profiling.profiler_warmup lr_scheduler.warmup_steps checkpoint.keep_latest_k
        parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers
        fault_tolerance.replica_id fault_tolerance.group_size debug.seed""",
    # In the place of a word.
    Within(-1, MOST): """
        training.global_batch_size parallelism.data_parallel_shard_degree checkpoint.load_step
        validation.steps""",
    Within(-1, 1024): "training.dataloader.num_workers",
    Within(1): """
        vision.image_size model.vocab_size model.rope_original_max_position_embeddings
        lora.rank""",
    Within(0.0): """
        optimizer.lr optimizer.eps optimizer.weight_decay
        vision.classes vision.mixup data.seed report.device_hour_price""",
    Within(0.0, above=True): """
        model.rope_scaling_factor model.rope_low_freq_factor model.rope_high_freq_factor
        lora.alpha lora.learning_rate""",
    _PART: """
        optimizer.beta1 optimizer.beta2
        vision.label_smoothing data.validation_fraction""",
    _SHARE: """
        lr_scheduler.decay_ratio lr_scheduler.min_lr_factor activation_checkpoint.memory_budget""",
    OneOf("Adam", "AdamW", SGD): "optimizer.name",
    OneOf(*AUGMENTATIONS): "vision.augmentation",
    Within(0.0, above=True, or_odd=True): "training.max_norm",
    Within(0, 1024): "validation.dataloader.num_workers",
    Within(0, 10**7): "comm.trace_buf_size",
    # Seconds, which are counted in nanoseconds, in 64 bits.
    Within(1, 10**9): "comm.init_timeout_seconds comm.train_timeout_seconds",
    Within(1, 10**12): "fault_tolerance.process_group_timeout_ms",
}
_RULES = [(key, rule) for rule, keys in _KEYS.items() for key in keys.split()]
# Upstream wants two checkpoints at least, or all.
_NEVER = {
    "checkpoint.keep_latest_k": 1,
    "training.global_batch_size": 0,
    "parallelism.data_parallel_shard_degree": 0,
    "validation.steps": 0,
}


def rule_errors(config: JobConfig) -> dict[str, str]:
    """Return which numbers and words break the rule of their key alone, by key."""
    found = {}
    for key, allowed in _RULES:
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
    if not impossible:
        yield from pipeline_errors(config)
