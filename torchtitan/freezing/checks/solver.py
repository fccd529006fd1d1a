"""Finds a time limit of the solver under which ranks could not wait for the plan."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.freezing.config import JobConfig

_LIMIT = "freezing.solver_time_limit_s"
# Upstream sets the second one after step 1. A run that resumes at a later step keeps the first.
_WAITS = ("train_timeout_seconds", "init_timeout_seconds")


def solver_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the limits of a method that plans.

    One rank solves; once the plan is due, the others wait for it in a collective. Where that ended
    first, a solver that takes long would end the run, instead of costing its plan.
    """
    limit_s, comm = config.freezing.solver_time_limit_s, config.comm
    if not limit_s > 0:
        yield f"{_LIMIT} is {limit_s}; it must be above 0"
        return
    if config.emulation.enable or comm.mode != "default":
        return  # nobody waits for another process
    for name in _WAITS:
        if limit_s >= getattr(comm, name):
            yield (
                f"{_LIMIT} is {limit_s}; it must be below comm.{name} ({getattr(comm, name)}), for "
                "which the other ranks wait for the plan: raise that one or lower this one"
            )
