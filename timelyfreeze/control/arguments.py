"""Finds errors in the arguments of ``TimelyFreeze``, beyond those that the settings refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from timelyfreeze.policies import ComparesOutputs, FreezePolicy, Source
from timelyfreeze.runtime import Exchange
from timelyfreeze.settings import (
    FreezeSettings,
    ratio_errors,
    seed_errors,
)
from timelyfreeze.timing import discard_errors


def optimizer_errors(policy: FreezePolicy | None) -> Iterator[str]:
    """Yield what lacks an optimizer where none was handed over."""
    compares: object = policy
    if isinstance(compares, ComparesOutputs):
        yield (
            f"optimizer is None; {policy!r} looks at the learning rate, so hand over the optimizer"
        )
    measurement = None if policy is None else policy.measurement
    if measurement is not None and measurement.source is not Source.UPDATES:
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


def check_alike(
    exchange: Exchange, settings: FreezeSettings, given: Mapping[str, Any], **whether: Any
) -> None:
    """Compare arguments across ranks, each of which plans and draws by its own.

    All ranks call this together. Objects of ``given`` are compared as they are written, or by their
    kind; what ``whether`` names must be given on all ranks or on none.
    """
    values = {
        **{field.name: repr(getattr(settings, field.name)) for field in fields(settings)},
        **{name: _written(value) for name, value in given.items()},
        **{name: "given" if value else "None" for name, value in whether.items()},
    }
    ranks = exchange.all_gather(values)
    errors = [
        f"{name} is {ranks[0][name]} on rank 0 and {theirs[name]} on rank {number}"
        for number, theirs in enumerate(ranks)
        for name in values
        if theirs[name] != ranks[0][name]
    ]
    if errors:
        raise ValueError(f"{'; '.join(errors)}; every rank needs the same arguments")


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return repr(value) if is_dataclass(value) else type(value).__qualname__
