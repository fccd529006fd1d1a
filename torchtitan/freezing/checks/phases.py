"""Finds steps of phases that leave no room to measure, to plan or to freeze."""

from __future__ import annotations

from collections.abc import Iterator

from timelyfreeze.settings import PhaseSchedule, replanning_errors
from timelyfreeze.timing import discard_errors
from torchtitan.freezing.config import Freezing, JobConfig


def phases_of(freezing: Freezing) -> PhaseSchedule:
    """Return the phases of a method that plans.

    Raises:
        ValueError: If a boundary breaks its rule.
    """
    return PhaseSchedule(
        freezing.last_warmup_step,
        freezing.last_monitor_step,
        freezing.last_ramp_step,
        freezing.monitoring,
    )


def warmup_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the phases of a method that makes no plan."""
    last = config.freezing.last_warmup_step
    if not 0 <= last < config.training.steps:
        yield (
            f"freezing.last_warmup_step is {last}; it must be 0 or more and lie before "
            f"training.steps ({config.training.steps}), or nothing is ever frozen"
        )
    if config.freezing.discard_batches < 0:
        yield f"freezing.discard_batches is {config.freezing.discard_batches}; it must be 0 or more"


def phase_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the phases of a method that plans, and with when it plans."""
    freezing = config.freezing
    try:
        phases = phases_of(freezing)
    except ValueError as error:
        yield str(error)
        return
    if not phases.measures:
        yield (
            f"freezing.last_monitor_step is {freezing.last_monitor_step}, as last_warmup_step; "
            f"freezing.method {freezing.method!r} needs steps in between to measure in"
        )
        return
    if freezing.last_monitor_step >= config.training.steps:
        yield (
            f"freezing.last_monitor_step is {freezing.last_monitor_step}; it must lie before "
            f"training.steps ({config.training.steps}), or nothing is ever frozen"
        )
    yield from discard_errors(freezing.discard_batches, phases)
    yield from replanning_errors(
        phases=phases,
        solver_delay_steps=freezing.solver_delay_steps,
        replan_every=freezing.replan_every,
        replan_threshold=freezing.replan_threshold,
        min_gain=freezing.min_gain,
    )
    delay = freezing.solver_delay_steps or 0
    if delay > 0 and freezing.last_monitor_step + delay >= config.training.steps:
        yield (
            f"freezing.solver_delay_steps is {delay}; the plan would come at step "
            f"{freezing.last_monitor_step + delay}, which must lie before training.steps "
            f"({config.training.steps})"
        )
