"""Finds errors in the arguments of ``TimelyFreeze``, beyond those that the settings refuse."""

from __future__ import annotations

from collections.abc import Iterator

from timelyfreeze.policies import ComparesOutputs, FreezePolicy, Source
from timelyfreeze.settings import (
    FreezeSettings,
    ratio_errors,
    seed_errors,
)
from timelyfreeze.timing import discard_errors


def policy_errors(policy: FreezePolicy | None, *, has_optimizer: bool) -> Iterator[str]:
    """Yield what a policy lacks."""
    compares: object = policy
    if not has_optimizer and isinstance(compares, ComparesOutputs):
        yield (
            f"optimizer is None; {policy!r} looks at the learning rate, so hand over the optimizer"
        )
    measurement = None if policy is None else policy.measurement
    if not has_optimizer and measurement is not None and measurement.source is not Source.UPDATES:
        yield (
            f"optimizer is None; {policy!r} watches gradients, which have to be read between the "
            "optimizer's step and zero_grad, so hand over the optimizer"
        )


def setting_errors(settings: FreezeSettings, *, plans: bool, n_stages: int) -> Iterator[str]:
    """Yield which of the numbers break their rules, beyond those that the settings refuse."""
    phases = settings.phases
    yield from seed_errors(settings.seed)
    if not plans:
        return
    yield from ratio_errors(settings.max_freeze_ratio, n_stages)
    if not phases.measures:
        yield f"monitor is {phases.last_monitor_step}, as warmup; a plan needs steps to measure in"
    else:
        yield from discard_errors(settings.discard_batches, phases)
    if not settings.solver_time_limit_s > 0:
        yield f"solver_time_limit_s is {settings.solver_time_limit_s}; it must be above 0"
