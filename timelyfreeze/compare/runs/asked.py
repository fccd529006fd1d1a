"""The runs that are asked for: each method under each schedule with each seed, and their peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from timelyfreeze.compare.runs.jobs import Job, Settings
from timelyfreeze.compare.runs.peers import (
    FEWER_STEPS,
    PEERS,
    fewer_microbatches,
    fewer_steps,
    freezes,
    peer_name,
    split_peer,
    with_steps,
)
from timelyfreeze.compare.runs.run import (
    FINISHED,
    TRUTHS,
    Run,
    concerning,
    find_runs,
    run_label,
    variant_folder,
)


@dataclass(frozen=True)
class _Asked:
    """One run: a method or a peer, under a schedule, with a seed and values that are varied."""

    schedule: str
    method: str
    seed: int
    variant: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        folder = variant_folder(self.variant)
        return Path(self.schedule, self.method, folder, f"seed_{self.seed}")

    def beside(self, method: str) -> _Asked:
        """Return the run of another method that this one is held against."""
        return replace(self, method=method, variant=concerning(method, self.variant))

    def job(self, nproc: int, stretch: float = 1.0) -> Job:
        """Return it as a run to be made."""
        trains = self.beside("none") if split_peer(self.method) else self
        record = {"schedule": self.schedule, "method": self.method, "seed": self.seed}
        if self.variant:
            record["variant"] = self.variant
        return Job(
            label=run_label(self.schedule, self.method, self.seed, self.variant),
            path=self.path,
            nproc=nproc,
            keys={
                "freezing.method": trains.method,
                "parallelism.pipeline_parallel_schedule": self.schedule,
                **dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), self.seed),
                **{key: TRUTHS.get(text, text) for key, text in trains.variant.items()},
            },
            record={**record, "stretch": stretch},
            fit=self._fit(stretch),
        )

    def _fit(self, stretch: float) -> Callable[[Path], dict[str, Any]] | None:
        """Return what gives further keys from the output, where they follow from other runs."""
        none = self.beside("none").path
        if peer := split_peer(self.method):
            name, method = peer
            return partial(_fitted, name, none=none, beside=replace(self, method=method).path)
        return None if stretch == 1.0 else partial(_stretched, none=none, factor=stretch)


def plan_jobs(
    methods: Sequence[str],
    schedules: Sequence[str],
    seeds: Sequence[int],
    nproc: int,
    stretch: float = 1.0,
    variants: Sequence[Mapping[str, str]] = ({},),
) -> list[Job]:
    """Return the jobs in the order they run in.

    Runs that are compared with each other, those of one seed, schedule and work, follow each other:
    a machine that slows down in the course of hours then slows all of them. Peers come behind all
    methods, one for each run that freezes.

    Args:
        methods: Values of ``freezing.method``, and peers.
        schedules: Pipeline schedules.
        seeds: Seeds.
        nproc: Processes of a run.
        stretch: How many times as many steps a run that freezes makes as that of none.
        variants: Keys that are varied, with the values of each variant.

    Raises:
        ValueError: If there is a peer without a run of none, or without one that freezes; if
            ``stretch`` makes no sense, or has no run of none to start from; or if a key that is
            varied makes no difference to any method.
    """
    peers = [method for method in methods if method in PEERS]
    others = [method for method in methods if method not in PEERS]
    _check(peers, others, stretch, variants)
    if stretch != 1.0:
        others.sort(key=freezes)  # stable: none comes first
    names = [*others, *(peer_name(peer, one) for peer in peers for one in others if freezes(one))]
    return [
        asked.job(nproc, stretch if freezes(asked.method) else 1.0)
        for seed in seeds
        for schedule in schedules
        for alike in _by_work(variants)
        for name in names
        for asked in _each(name, schedule, seed, alike)
    ]


def _check(
    peers: Sequence[str],
    others: Sequence[str],
    stretch: float,
    variants: Sequence[Mapping[str, str]],
) -> None:
    """Raise for what ``plan_jobs`` says."""
    if peers and ("none" not in others or not any(map(freezes, others))):
        raise ValueError(
            f"--methods has {', '.join(peers)}, which is given the time of a freezing method; name "
            "none and one that freezes as well"
        )
    if not 0.0 < stretch < math.inf:
        raise ValueError(f"--stretch is {stretch}; it must be above 0")
    if stretch != 1.0 and "none" not in others:
        raise ValueError("--stretch multiplies the steps of none; name it in --methods as well")
    for key in variants[0]:
        if not any(key in concerning(method, variants[0]) for method in others):
            raise ValueError(
                f"--vary has {key}, which concerns none of --methods {' '.join(others)}"
            )


def _by_work(variants: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Return the variants with those together that differ in the freezing alone."""
    works = [concerning("none", variant) for variant in variants]
    return [
        [variant for variant, own in zip(variants, works, strict=True) if own == work]
        for i, work in enumerate(works)
        if work not in works[:i]
    ]


def _each(
    name: str, schedule: str, seed: int, variants: Sequence[Mapping[str, str]]
) -> Iterator[_Asked]:
    """Yield the runs of a method or peer, one for all variants that are the same to it."""
    known = [concerning(name, variant) for variant in variants]
    for i, variant in enumerate(known):
        if variant not in known[:i]:
            yield _Asked(schedule, name, seed, variant)


def errors(jobs: Sequence[Job], settings: Settings, fixed: Iterable[str] = ()) -> list[str]:
    """Return a message for each error in what was asked for.

    ``fixed`` are keys besides those of the jobs that the trainer's arguments may not set.
    """
    found = []
    if not settings.config.is_file():
        found.append(f"CONFIG is {str(settings.config)!r}; it must be a TOML file")
    labels = Counter(job.label for job in jobs)
    if twice := sorted(label for label in labels if labels[label] > 1):
        found.append(f"asked for twice: {', '.join(twice)}; name each once")
    ours = {"job.config_file", "job.dump_folder", *fixed}.union(*(job.keys for job in jobs))
    found += [
        f"--{key} is among the trainer's arguments; each run has its own, leave it out"
        for key in sorted(ours & settings.keys)
    ]
    return found


def _fitted(peer: str, output: Path, *, none: Path, beside: Path) -> dict[str, Any]:
    """Return the keys of a peer, from the two runs whose folders are relative to ``output``."""
    fit = fewer_steps if peer == FEWER_STEPS else fewer_microbatches
    return fit(_finished(output / none), _finished(output / beside).seconds)


def _stretched(output: Path, *, none: Path, factor: float) -> dict[str, Any]:
    """Return the keys of a run with ``factor`` times as many steps as that of none."""
    run = _finished(output / none)
    return with_steps(run, max(1, round(factor * run.summary.steps)))


def _finished(folder: Path) -> Run:
    runs = find_runs([folder]).runs if folder.is_dir() else ()
    for run in runs:
        if run.status == FINISHED:
            return run
    raise ValueError(f"{folder} has no finished run, whose time is needed")
