"""The runs of a sweep: methods by schedules by seeds, and their peers."""

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from timelyfreeze.compare.runs.jobs import DEGREE, Job, Settings
from timelyfreeze.compare.runs.run import Run, finished_run
from timelyfreeze.compare.runs.variants import (
    FEWER_STEPS,
    PEERS,
    TRUTHS,
    UNTIL,
    concerning,
    freezes,
    peer_name,
    run_folder,
    run_label,
    split_peer,
)
from timelyfreeze.records.tables import STEPS
from timelyfreeze.schedule import ActionKind, build_dag, makespan, stages_per_rank


def _job(
    schedule: str, name: str, seed: int, variant: Mapping[str, str], nproc: int, steps_factor: float
) -> Job:
    """Return a run: a method or a peer, with a seed and varied values."""
    peer, method = split_peer(name) or ("", name)
    trained, varied = ("none", concerning("none", variant)) if peer else (name, variant)
    varies = {"variant": variant} if variant else {}
    fit = None
    if peer or steps_factor != 1.0:
        none = run_folder(schedule, "none", seed, concerning("none", variant))
        beside = run_folder(schedule, method, seed, variant)
        fit = partial(_fitted, peer, none=none, beside=beside, steps_factor=steps_factor)
    return Job(
        label=run_label(schedule, name, seed, variant),
        path=run_folder(schedule, name, seed, variant),
        nproc=nproc,
        keys={
            "freezing.method": trained,
            # Where CONFIG lets adapters learn first, baselines do without.
            **({} if concerning(trained, {UNTIL: "1"}) else {UNTIL: 0}),
            "parallelism.pipeline_parallel_schedule": schedule,
            **dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), seed),
            **{key: TRUTHS.get(text, text) for key, text in varied.items()},
        },
        record={
            "schedule": schedule,
            "method": name,
            "seed": seed,
            **varies,
            "steps_factor": steps_factor,
        },
        fit=fit,
    )


def plan_jobs(
    methods: Sequence[str],
    schedules: Sequence[str],
    seeds: Sequence[int],
    nproc: int,
    steps_factor: float = 1.0,
    variants: Sequence[Mapping[str, str]] = ({},),
) -> list[Job]:
    """Return the jobs in the order of their start.

    Comparable runs (of a seed, schedule and work) follow each other, so that a machine slowing down
    over hours slows all of them. Peers come behind all methods. A freezing run makes
    ``steps_factor`` times the steps of none.
    """
    peers = [method for method in methods if method in PEERS]
    others = [method for method in methods if method not in PEERS]
    if peers and ("none" not in others or not any(map(freezes, others))):
        raise ValueError(
            f"--methods has {', '.join(peers)}, which is given the time of a freezing method; name "
            "none and one that freezes as well"
        )
    if not 0.0 < steps_factor < math.inf:
        raise ValueError(f"--steps-factor is {steps_factor}; it must be above 0")
    if steps_factor != 1.0 and "none" not in others:
        raise ValueError(
            "--steps-factor multiplies the steps of none; name it in --methods as well"
        )
    for key in variants[0]:
        if not any(key in concerning(method, variants[0]) for method in others):
            raise ValueError(
                f"--vary has {key}, which concerns none of --methods {' '.join(others)}"
            )
    if steps_factor != 1.0:
        others.sort(key=freezes)  # stable: none comes first
    names = [*others, *(peer_name(peer, one) for peer in peers for one in others if freezes(one))]
    return [
        _job(schedule, name, seed, variant, nproc, steps_factor if freezes(name) else 1.0)
        for seed in seeds
        for schedule in schedules
        # Those together that differ in the freezing alone.
        for alike in _alike("none", variants)
        for name in names
        for variant in (concerning(name, same[0]) for same in _alike(name, alike))
    ]


def _alike(name: str, variants: Iterable[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Return the variants, with equal variants of a method together."""
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for variant in variants:
        found.setdefault(tuple(concerning(name, variant).values()), []).append(variant)
    return list(found.values())


def errors(jobs: Sequence[Job], settings: Settings, fixed: Iterable[str] = ()) -> list[str]:
    """Return the errors of a sweep; no argument may set ``fixed`` keys."""
    found = []
    if not settings.config.is_file():
        found.append(f"CONFIG is {str(settings.config)!r}; it must be a TOML file")
    if wrong := [job.nproc for job in jobs if job.nproc < 1]:
        found.append(f"--nproc is {wrong[0]}; it must be 1 or more")
    labels = Counter(job.label for job in jobs)
    if twice := sorted(label for label in labels if labels[label] > 1):
        found.append(f"asked for twice: {', '.join(twice)}; name each once")
    ours = {"job.config_file", "job.dump_folder", *fixed}.union(*(job.keys for job in jobs))
    found += [
        f"--{key} is among the trainer's arguments; each run has its own, leave it out"
        for key in sorted(ours & settings.keys)
    ]
    return found


def _fitted(
    peer: str, output: Path, *, none: Path, beside: Path, steps_factor: float
) -> dict[str, Any]:
    """Return the keys of a peer, or of a longer run, from runs with folders below ``output``."""
    run = _finished(output / none)
    if not peer:
        return _with_steps(run, max(1, round(steps_factor * run.summary.steps)))
    fit = fewer_steps if peer == FEWER_STEPS else fewer_microbatches
    return fit(run, _finished(output / beside).seconds)


def _finished(folder: Path) -> Run:
    if run := finished_run(folder):
        return run
    raise ValueError(f"{folder} has no finished run, whose time is needed")


_CSV = "parallelism.pipeline_parallel_schedule_csv"
# Durations of actions relative to each other: F = dX = dW.
_LENGTHS = {kind: 2.0 if kind is ActionKind.FULL_BACKWARD else 1.0 for kind in ActionKind}


def fewer_steps(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` with as many steps as fit into ``seconds``, 1 at least.

    Warm-up and all of the learning-rate schedule are squeezed in proportion. Validations are about
    as many as before. A method no faster than none leaves all steps.
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
    """Return the keys of a run of ``none`` of another length, its schedules in proportion."""
    n_before = none.summary.steps
    keys: dict[str, Any] = {"training.steps": n_steps}
    for key in ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps"):
        if (length := none.settings.get(key)) is not None:
            keys[key] = round(length * n_steps / n_before)
    if (interval := none.settings.get("validation.freq")) is not None:
        keys["validation.freq"] = max(1, round(interval * n_steps / n_before))
    return keys


def fewer_microbatches(none: Run, seconds: float) -> dict[str, Any]:
    """Return the keys of a run of ``none`` whose batches have microbatches for ``seconds`` only.

    The shorter batch time follows from the schedule, all stages alike and F = dX = dW; the table
    has the measured time.
    """
    settings = none.settings
    if settings.get(_CSV):
        raise ValueError(f"{_CSV} is {settings[_CSV]!r}, which is for one number of microbatches")
    keys = (DEGREE, "parallelism.pipeline_parallel_microbatch_size", "training.local_batch_size")
    if missing := [key for key in keys if key not in settings]:
        raise ValueError(f"the run of none does not say {missing[0]}")
    n_ranks, size, n_examples = (int(settings[key]) for key in keys)
    n_before = n_examples // size
    length = _length(none.schedule, n_ranks, n_before)
    for n in range(n_before, 0, -1):
        try:
            expected = none.seconds * _length(none.schedule, n_ranks, n) / length
        except ValueError:  # a schedule may want a multiple of something
            continue
        if expected <= seconds:
            fewer = {"training.local_batch_size": n * size}
            if (whole := settings.get("training.global_batch_size", -1)) > 0:
                fewer["training.global_batch_size"] = whole * n // n_before
            return fewer
    raise ValueError(
        f"no number of microbatches that {none.schedule} can have fits into {seconds:.4g} s"
    )


def _length(schedule: str, n_ranks: int, n_microbatches: int) -> float:
    """Return the length of a batch, in forwards of a microbatch on a rank."""
    # Imported late: it loads torch, which the rest does without.
    from timelyfreeze.runtime import named_order

    n_stages = stages_per_rank(schedule) or 1
    dag = build_dag(named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages))
    return makespan(dag, [_LENGTHS[action.kind] for action in dag.actions])
