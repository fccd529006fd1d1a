"""Finds errors of freezing: phases without room, settings of methods and of the front."""

from collections.abc import Iterator

from timelyfreeze.policies import LORA, FreezePolicy, freezes_by_turns, parse_method
from timelyfreeze.schedule import stages_per_rank
from timelyfreeze.settings import FreezeSettings
from torchtitan.settings import Freezing, JobConfig, global_rows, preset_errors

# Upstream sets the second one after step 1. A run that resumes at a later step keeps the first.
_WAITS = ("train_timeout_seconds", "init_timeout_seconds")


def freeze_settings(freezing: Freezing) -> FreezeSettings:
    """Return the checked ``[freezing]`` section for the library."""
    method = parse_method(freezing.method)
    return freezing if method is None or method.plans else freezing.unplanned


def freezing_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of ``[freezing]``: key, value and rule."""
    freezing = config.freezing
    yield from _until_errors(config)
    try:
        method = parse_method(freezing.method)
    except ValueError as error:
        yield str(error)
        return
    if method is None:
        return
    yield from freezing.errors(plans=method.plans, n_stages=_n_stages(config))
    yield from _last_step_errors(config, plans=method.plans)
    if method.plans:
        yield from _solver_errors(config)
    if method.policy is not None:
        policy: FreezePolicy = getattr(freezing, method.policy)
        yield from policy.errors()
    yield from preset_errors(config, given=())  # contradictions are told where it was read


def _n_stages(config: JobConfig) -> int | None:
    """Return how many stages the pipeline will have, where the configuration alone tells."""
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return None
    per_rank = stages_per_rank(parallelism.pipeline_parallel_schedule)
    return None if per_rank is None else per_rank * parallelism.pipeline_parallel_degree


def _until_errors(config: JobConfig) -> Iterator[str]:
    """Yield why adapters cannot learn first."""
    until, n_steps = config.lora.until, config.training.steps
    if until and config.freezing.method == LORA:
        yield (
            f'lora.until is {until}, and freezing.method is "{LORA}"; name the method for the '
            "weights, or leave lora.until out"
        )
    elif until >= n_steps:
        yield (
            f"lora.until is {until}; it must lie before training.steps ({n_steps}): for adapters "
            f'alone freezing.method is "{LORA}"'
        )


def _last_step_errors(config: JobConfig, *, plans: bool) -> Iterator[str]:
    """Yield steps beyond the end of the run, of all of which phases are counted."""
    freezing, n_steps = config.freezing, config.training.steps - config.lora.until
    name = "last_monitor_step" if plans else "last_warmup_step"
    end = "training.steps" + (" after lora.until" if config.lora.until else "")
    if (last := getattr(freezing, name)) >= n_steps:
        yield (
            f"freezing.{name} is {last}; it must lie before {end} ({n_steps}), or nothing is ever "
            "frozen"
        )
    due = freezing.last_monitor_step + (delay := freezing.solver_delay_steps or 0)
    if plans and delay > 0 and due >= n_steps:
        yield (
            f"freezing.solver_delay_steps is {delay}; the plan would come at step {due}, which "
            f"must lie before {end} ({n_steps})"
        )


def _solver_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors in the limits of a planning method.

    A single rank solves; once the plan is due, the others wait in a collective. With a shorter
    timeout, a slow solver would end the run, instead of costing its plan.
    """
    limit_s, comm = config.freezing.solver_time_limit_s, config.comm
    if config.emulation.enable or comm.mode != "default":
        return  # nobody waits for another process
    for name in _WAITS:
        if limit_s >= getattr(comm, name):
            yield (
                f"freezing.solver_time_limit_s is {limit_s}; it must be below comm.{name} "
                f"({getattr(comm, name)}), for which the other ranks wait for the plan: raise that "
                "one or lower this one"
            )


def caches(config: JobConfig) -> bool:
    """Return whether outputs of a frozen front are to be kept; not where nothing is frozen."""
    return config.freezing.cache.enable and freezes_by_turns(config.freezing.method)


def front_errors(config: JobConfig) -> Iterator[str]:
    """Yield senseless numbers and words for a frozen front."""
    freezing = config.freezing
    if not freezes_by_turns(freezing.method):
        return
    for section in (freezing.cache, freezing.elastic):
        if section.enable:
            yield from section.errors()
    limit_s, timeout_s = freezing.elastic.join_limit_s, config.comm.init_timeout_seconds
    joins = freezing.elastic.enable or (freezing.packing.is_on and not freezing.packing.gives_back)
    # A move could not be given up: messages from before it would be, first.
    if joins and not 0.0 < limit_s < timeout_s:
        yield (
            f"freezing.elastic.join_limit_s is {limit_s}; it must be above 0 and below "
            f"comm.init_timeout_seconds ({timeout_s}), after which ranks fail that wait for another"
        )
    if freezing.packing.is_on:
        yield from freezing.packing.errors()
    most, rows = freezing.packing.max_global_batch, global_rows(config)
    if freezing.packing.is_on and 0 < most < rows:
        yield (
            f"freezing.packing.max_global_batch is {most}; it must be 0, or at least "
            f"training.global_batch_size ({rows})"
        )
