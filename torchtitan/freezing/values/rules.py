"""The rule of each key for its value alone."""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from timelyfreeze.files import MOST, OneOf, Within
from torchtitan.freezing.values.pipeline import pipeline_errors
from torchtitan.images.transforms import AUGMENTATIONS
from torchtitan.settings import JobConfig

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
        lora.until
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
    OneOf("Adam", "AdamW", "SGD"): "optimizer.name",
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
    """Return values breaking the rule of their key alone, by key."""
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
    """Yield impossible values, or values without a possible pipeline."""
    yield from (impossible := rule_errors(config)).values()
    if not impossible:
        yield from pipeline_errors(config)
