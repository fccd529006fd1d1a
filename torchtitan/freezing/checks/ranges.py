"""The numbers that upstream's keys may have; upstream itself looks at few before it uses them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter

from torchtitan.freezing.config import JobConfig

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
