"""The runs that are asked for: each method under each schedule with each seed, and their peers.

How much a peer trains follows from the times of two finished runs, its method's and that of none.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from timelyfreeze.compare.jobs import Job
from timelyfreeze.compare.peers import FEWER_STEPS, PEERS, freezes, peer_name
from timelyfreeze.compare.runs import FINISHED, Run, find_runs
from timelyfreeze.records import STEPS
from timelyfreeze.schedule import ActionKind, build_dag, makespan

_CSV = "parallelism.pipeline_parallel_schedule_csv"
# Durations of actions relative to each other: F = dX = dW.
_LENGTHS = {kind: 2.0 if kind is ActionKind.FULL_BACKWARD else 1.0 for kind in ActionKind}


def plan_jobs(
    methods: Sequence[str],
    schedules: Sequence[str],
    seeds: Sequence[int],
    nproc: int,
    stretch: float = 1.0,
) -> list[Job]:
    """Return the jobs in the order they run in.

    Runs that are compared with each other, those of one seed and schedule, follow each other: a
    machine that slows down in the course of hours then slows all of them. Peers come behind all
    methods, one for each that freezes.

    Args:
        methods: Values of ``freezing.method``, and peers.
        schedules: Pipeline schedules.
        seeds: Seeds.
        nproc: Processes of a run.
        stretch: How many times as many steps a run that freezes makes as that of none.

    Raises:
        ValueError: If there is a peer without a run of none, or without one that freezes; or if
            ``stretch`` makes no sense, or has no run of none to start from.
    """
    peers = [method for method in methods if method in PEERS]
    others = [method for method in methods if method not in PEERS]
    freezing = [method for method in others if method != "none"]
    if peers and ("none" not in others or not freezing):
        raise ValueError(
            f"--methods has {', '.join(peers)}, which is given the time of a freezing method; name "
            "none and one that freezes as well"
        )
    if not 0.0 < stretch < math.inf:
        raise ValueError(f"--stretch is {stretch}; it must be above 0")
    if stretch != 1.0:
        if "none" not in others:
            raise ValueError("--stretch multiplies the steps of none; name it in --methods as well")
        others.sort(key=freezes)  # stable: none comes first
    return [
        job
        for seed in seeds
        for schedule in schedules
        for job in (
            *(_job(schedule, m, seed, nproc, stretch if freezes(m) else 1.0) for m in others),
            *(_peer(peer, schedule, m, seed, nproc) for peer in peers for m in freezing),
        )
    ]


def _job(schedule: str, method: str, seed: int, nproc: int, stretch: float = 1.0) -> Job:
    fit = partial(_stretched, none=_path(schedule, "none", seed), factor=stretch)
    return Job(
        label=f"{schedule} {method} seed {seed}",
        path=_path(schedule, method, seed),
        nproc=nproc,
        keys={
            "freezing.method": method,
            "parallelism.pipeline_parallel_schedule": schedule,
            **dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), seed),
        },
        record={"schedule": schedule, "method": method, "seed": seed, "stretch": stretch},
        fit=None if stretch == 1.0 else fit,
    )


def _peer(peer: str, schedule: str, method: str, seed: int, nproc: int) -> Job:
    name = peer_name(peer, method)
    as_none = _job(schedule, "none", seed, nproc)
    return Job(
        label=f"{schedule} {name} seed {seed}",
        path=_path(schedule, name, seed),
        nproc=nproc,
        keys=as_none.keys,
        record={**as_none.record, "method": name},
        fit=partial(
            _fit,
            squeeze=fewer_steps if peer == FEWER_STEPS else fewer_microbatches,
            none=as_none.path,
            beside=_path(schedule, method, seed),
        ),
    )


def _path(schedule: str, method: str, seed: int) -> Path:
    return Path(schedule, method, f"seed_{seed}")


def _fit(
    output: Path, *, squeeze: Callable[[Run, float], dict[str, Any]], none: Path, beside: Path
) -> dict[str, Any]:
    """Return the keys of a peer, from the two runs whose folders are relative to ``output``."""
    return squeeze(_finished(output / none), _finished(output / beside).seconds)


def _stretched(output: Path, *, none: Path, factor: float) -> dict[str, Any]:
    """Return the keys of a run with ``factor`` times as many steps as that of none."""
    run = _finished(output / none)
    return _with_steps(run, max(1, round(factor * run.summary.steps)))


def _finished(folder: Path) -> Run:
    runs = find_runs([folder]).runs if folder.is_dir() else ()
    for run in runs:
        if run.status == FINISHED:
            return run
    raise ValueError(f"{folder} has no finished run, whose time is needed")


def fewer_steps(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` with as many steps as fit into ``seconds``, 1 at least.

    Warm-up and all of the learning-rate schedule are squeezed in proportion. Validations are about
    as many as before, and one is after the last step. A method that takes no less time than none
    leaves all steps.

    Raises:
        ValueError: If the times of some steps are not known, or not a single step fits.
    """
    n_before = none.summary.steps
    if len(none.step_ends) != n_before:
        raise ValueError(
            f"{none.folder} has the times of {len(none.step_ends)} of {n_before} steps in "
            f"{STEPS.name}; all are needed"
        )
    n_steps = bisect.bisect_right(none.step_ends, seconds)
    if n_steps == 0:
        raise ValueError(f"not even one step of {none.folder} fits into {seconds:.4g} s")
    return _with_steps(none, n_steps)


def _with_steps(none: Run, n_steps: int) -> dict[str, Any]:
    """Return the keys of a run of another length, its schedules in proportion."""
    n_before = none.summary.steps
    keys: dict[str, Any] = {"training.steps": n_steps}
    for key in ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps"):
        if (length := none.settings.get(key)) is not None:
            keys[key] = round(length * n_steps / n_before)
    if (interval := none.settings.get("validation.freq")) is not None:
        keys["validation.freq"] = _divisor_near(n_steps, interval * n_steps / n_before)
    return keys


def _divisor_near(number: int, wanted: float) -> int:
    """Return the divisor of ``number`` that is nearest to ``wanted``, as a ratio."""
    divisors = (i for i in range(1, number + 1) if number % i == 0)
    return min(divisors, key=lambda divisor: abs(math.log(divisor / wanted)))


def fewer_microbatches(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` whose batches have microbatches for ``seconds`` only.

    How much shorter a batch of fewer microbatches is follows from its schedule, all stages alike
    and F = dX = dW; what it really took is in the table.

    Raises:
        ValueError: If the schedule is one of a CSV file, or no number of microbatches will do.
    """
    settings = none.settings
    if settings.get(_CSV):
        raise ValueError(f"{_CSV} is {settings[_CSV]!r}, which is for one number of microbatches")
    n_ranks = int(_setting(settings, "parallelism.pipeline_parallel_degree"))
    size = int(_setting(settings, "parallelism.pipeline_parallel_microbatch_size"))
    n_examples = int(_setting(settings, "training.local_batch_size"))
    n_before = n_examples // size
    length = _length(none.schedule, n_ranks, n_before)
    for n in range(n_before, 0, -1):
        try:
            expected = none.seconds * _length(none.schedule, n_ranks, n) / length
        except ValueError:  # a schedule may want a multiple of something
            continue
        if expected <= seconds:
            keys = {"training.local_batch_size": n * size}
            if (whole := settings.get("training.global_batch_size", -1)) > 0:
                keys["training.global_batch_size"] = whole * n // n_before
            return keys
    raise ValueError(
        f"no number of microbatches that {none.schedule} can have fits into {seconds:.4g} s"
    )


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    if key not in settings:
        raise ValueError(f"the run of none does not say {key}")
    return settings[key]


def _length(schedule: str, n_ranks: int, n_microbatches: int) -> float:
    """Return how long a batch is, in forwards of one microbatch on one rank."""
    # Imported late: it loads torch, which the rest does without.
    from timelyfreeze.runtime import named_order, stages_per_rank

    n_stages = stages_per_rank(schedule) or 1
    dag = build_dag(named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages))
    return makespan(dag, [_LENGTHS[action.kind] for action in dag.actions])
