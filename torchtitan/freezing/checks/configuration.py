"""Finds errors in the configuration before any process group starts, all of them at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from timelyfreeze.policies import NONE, parse_method
from timelyfreeze.runtime import known_schedules, splits_backward, stages_per_rank
from timelyfreeze.schedule import ScheduleOrder, order_from_csv
from timelyfreeze.settings import (
    FreezeSettings,
    PhaseSchedule,
    arguments_named,
    ratio_errors,
    seed_errors,
    skip_errors,
    unknown_words,
)
from torchtitan.freezing.checks.checkpoints import checkpoint_errors, output_errors
from torchtitan.freezing.checks.compile import (
    compiles_blocks,
    measuring_errors,
    policy_errors,
    split_error,
)
from torchtitan.freezing.checks.data import data_errors, example_errors
from torchtitan.freezing.checks.emulation import emulation_errors
from torchtitan.freezing.checks.float8 import float8_errors
from torchtitan.freezing.checks.models import model_errors
from torchtitan.freezing.checks.parallel import parallel_errors
from torchtitan.freezing.checks.phases import phase_errors, phases_of, warmup_errors
from torchtitan.freezing.checks.solver import solver_errors
from torchtitan.freezing.checks.tokenizers import tokenizer_errors
from torchtitan.freezing.checks.validation import validation_errors
from torchtitan.freezing.config import Freezing, JobConfig, toml_key
from torchtitan.freezing.report.reference import reference_errors


class ConfigError(ValueError):
    """The configuration has errors; the message lists each with key, value and rule."""


def check(job_config: JobConfig, *, trains: bool = False) -> None:
    """Raise if the configuration cannot work.

    Args:
        job_config: What was asked for.
        trains: Whether training is about to begin here, so that what it reads and where it writes
            have to be there.

    Raises:
        ConfigError: Naming every error found.
    """
    with arguments_named(toml_key):
        errors = list(_errors(job_config, trains=trains))
    if errors:
        raise ConfigError(join_errors(errors))


def _errors(job_config: JobConfig, *, trains: bool) -> Iterator[str]:
    yield from _pipeline_errors(job_config)
    yield from emulation_errors(job_config)
    if not job_config.emulation.enable:
        yield from parallel_errors(job_config)
    yield from model_errors(job_config)
    yield from float8_errors(job_config)
    yield from data_errors(job_config)
    yield from validation_errors(job_config)
    yield from _freezing_errors(job_config)
    yield from reference_errors(job_config)
    if trains:
        yield from tokenizer_errors(job_config)
        yield from checkpoint_errors(job_config)
        yield from output_errors(job_config)


def check_examples(job_config: JobConfig) -> None:
    """Raise if the instruction data that lies on disk cannot be used.

    All its examples are read, which the data loader then need not do again. Apart from :func:`check`,
    because not everything that needs a configuration needs its data.

    Raises:
        ConfigError: Naming the path, or the first example that is broken, of each data set.
    """
    if errors := list(example_errors(job_config)):
        raise ConfigError(join_errors(errors))


# A value that nobody would read to its end; a path may be long.
_LONG_WORD = re.compile(r"[^\s'\",]{600,}")


def _beginning(word: re.Match[str]) -> str:
    return f"{word[0][:100]}... ({len(word[0])} characters)"


def join_errors(errors: Sequence[str]) -> str:
    """Return the message of an error that tells of ``errors``, a line for each."""
    return (
        "The configuration has "
        + ("an error" if len(errors) == 1 else f"{len(errors)} errors")
        + ":\n"
        + "\n".join(f"  - {_LONG_WORD.sub(_beginning, error)}" for error in errors)
    )


def freeze_settings(freezing: Freezing) -> FreezeSettings:
    """Return the checked ``[freezing]`` section as the library wants it."""
    ratio = freezing.max_freeze_ratio
    method = parse_method(freezing.method)
    return FreezeSettings(
        phases=phases_of(freezing)
        if method is None or method.plans
        else PhaseSchedule.unplanned(freezing.last_warmup_step),
        max_freeze_ratio=tuple(map(float, ratio)) if isinstance(ratio, list) else float(ratio),
        seed=freezing.seed,
        first_stage=freezing.first_stage,
        skip_input_grads=freezing.skip_input_grads,
        discard_batches=freezing.discard_batches,
        solver_time_limit_s=freezing.solver_time_limit_s,
        solver_delay_steps=freezing.solver_delay_steps,
        replan_every=freezing.replan_every,
        replan_threshold=freezing.replan_threshold,
        min_gain=freezing.min_gain,
        score_memory=freezing.score_memory,
        score_dtype=freezing.score_dtype,
    )


def _pipeline_errors(config: JobConfig) -> Iterator[str]:
    parallelism, training = config.parallelism, config.training
    if config.model.vocab_size is not None and config.model.vocab_size < 1:
        yield f"model.vocab_size is {config.model.vocab_size}; it must be 1 or more"
    if parallelism.pipeline_parallel_degree <= 1:
        return
    name = parallelism.pipeline_parallel_schedule
    if not _is_known(name):
        yield (
            f"parallelism.pipeline_parallel_schedule is {name!r}; "
            f"known: {', '.join(known_schedules())}"
        )
    size = parallelism.pipeline_parallel_microbatch_size
    if size < 1 or training.local_batch_size % size:
        yield (
            f"training.local_batch_size is {training.local_batch_size}, which "
            f"parallelism.pipeline_parallel_microbatch_size ({size}) must divide"
        )
    if name.lower() == "dualpipev" and parallelism.pipeline_parallel_expert_parallel_overlap:
        key = "parallelism.pipeline_parallel_expert_parallel_overlap"
        if not torch.accelerator.is_available():
            yield (
                f"{key} is true; overlapping DualPipeV needs an accelerator's streams, so set it "
                "to false on a CPU"
            )
        elif config.freezing.method != NONE:
            yield (
                f"{key} is true; actions that overlap cannot be timed one by one, so "
                f"freezing.method {config.freezing.method!r} needs it to be false"
            )
        elif config.emulation.enable:
            yield f"{key} is true; an emulation runs actions one by one, so it must be false"
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    if _is_known(name) and reshards and _order_splits_backward(config):
        yield (
            'parallelism.fsdp_reshard_after_forward is "always"; torch then loses gradients of '
            f'a backward that is split, as {name} does, so it must be "default" or "never"'
        )
    if _is_known(name) and compiles_blocks(config) and _order_splits_backward(config):
        yield split_error(name)
    csv = parallelism.pipeline_parallel_schedule_csv
    if csv:
        yield from _csv_errors(config, Path(csv))


def _is_known(schedule_name: str) -> bool:
    return schedule_name.lower() in (known.lower() for known in known_schedules())


def _csv_errors(config: JobConfig, path: Path) -> Iterator[str]:
    key = "parallelism.pipeline_parallel_schedule_csv"
    if not os.path.isfile(path):
        yield f"{key} is {str(path)!r}, which is not a file"
        return
    try:
        order = order_from_csv(path.read_text())
    except (OSError, ValueError) as error:
        yield f"{key} is {str(path)!r}: {error}"
        return
    if order.n_ranks != config.parallelism.pipeline_parallel_degree:
        yield (
            f"{key} is {str(path)!r}, which has {order.n_ranks} ranks; it needs "
            f"parallelism.pipeline_parallel_degree ({config.parallelism.pipeline_parallel_degree})"
        )
    if (n := n_microbatches(config)) is not None and order.n_microbatches != n:
        yield (
            f"{key} is {str(path)!r}, which has {order.n_microbatches} microbatches; it needs "
            f"training.local_batch_size / parallelism.pipeline_parallel_microbatch_size ({n})"
        )
    if any(rank != stage % order.n_ranks for stage, rank in enumerate(order.stage_to_rank)):
        yield (
            f"{key} is {str(path)!r}, whose stages lie on ranks {list(order.stage_to_rank)}; "
            f"upstream places stage s of a CSV schedule on rank s modulo {order.n_ranks}"
        )


def n_microbatches(config: JobConfig) -> int | None:
    """Return the number of microbatches of a pipeline batch; None where keys contradict."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    if size < 1 or config.training.local_batch_size % size:
        return None
    return config.training.local_batch_size // size


def _freezing_errors(config: JobConfig) -> Iterator[str]:
    freezing = config.freezing
    try:
        method = parse_method(freezing.method)
    except ValueError as error:
        yield str(error)
        return
    if method is None:
        return
    if method.plans:
        yield from phase_errors(config)
        yield from ratio_errors(freezing.max_freeze_ratio, _n_stages(config))
        yield from solver_errors(config)
    else:
        yield from warmup_errors(config)
    if method.policy is not None:
        yield from getattr(freezing, method.policy).errors()
    yield from unknown_words(
        first_stage=freezing.first_stage,
        skip_input_grads=freezing.skip_input_grads,
        score_memory=freezing.score_memory,
        score_dtype=freezing.score_dtype,
    )
    yield from skip_errors(freezing.first_stage, freezing.skip_input_grads)
    yield from seed_errors(freezing.seed)
    yield from _unsupported(config)


def _n_stages(config: JobConfig) -> int | None:
    """Return how many stages the pipeline will have, where the configuration alone tells."""
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return None
    per_rank = stages_per_rank(parallelism.pipeline_parallel_schedule)
    return None if per_rank is None else per_rank * parallelism.pipeline_parallel_degree


def _order_splits_backward(config: JobConfig) -> bool:
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if csv:
        try:
            order: ScheduleOrder = order_from_csv(Path(csv).read_text())
        except (OSError, ValueError):
            return False  # reported as an error of its own
        return any(action.kind.value == "W" for rank in order.ranks for action in rank)
    return splits_backward(config.parallelism.pipeline_parallel_schedule)


def _unsupported(config: JobConfig) -> Iterator[str]:
    """Name combinations with freezing that cannot work."""
    method = config.freezing.method
    if config.parallelism.pipeline_parallel_degree <= 1:
        yield (
            "parallelism.pipeline_parallel_degree is "
            f"{config.parallelism.pipeline_parallel_degree}; freezing.method {method!r} needs a "
            "pipeline of 2 ranks or more"
        )
        return
    yield from policy_errors(config)
    yield from measuring_errors(config)
    if config.optimizer.early_step_in_backward:
        yield (
            "optimizer.early_step_in_backward is true; freezing needs gradients of all "
            "microbatches before the optimizer steps, so it must be false"
        )
    known = _is_known(config.parallelism.pipeline_parallel_schedule)
    if known and config.activation_checkpoint.mode != "none" and _order_splits_backward(config):
        yield (
            f"activation_checkpoint.mode is {config.activation_checkpoint.mode!r}; torch cannot "
            f"split the backward of {config.parallelism.pipeline_parallel_schedule} through "
            'recomputed layers, so it must be "none"'
        )
