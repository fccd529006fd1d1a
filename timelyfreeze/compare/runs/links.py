"""The links of a chain from TorchTitan's keys to ours, and their runs.

A link is a set of keys over those of another link. All have as many rows in an optimizer step: a
packed sequence holds several, so batches of rows have more sequences.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from timelyfreeze.cli import run_environment
from timelyfreeze.cli.hub import config_table, value_of
from timelyfreeze.compare.runs.jobs import ROOT, Job, Settings
from timelyfreeze.compare.runs.run import finished_run
from timelyfreeze.policies import LORA
from timelyfreeze.whatif.answers import answer, order_of
from timelyfreeze.whatif.bounds_file import BoundsFile, read_bounds_file
from timelyfreeze.whatif.grid import Case, Grid
from timelyfreeze.whatif.partition import memory_load

# Packed sequences that are read to know how many rows one holds.
_N_READ = 200
_COUNTS = re.compile(r"^-- sequence \d+: (\d+) examples?, .*; (\d+) targets", re.M)
SCHEDULE, PARTITION = "parallelism.pipeline_parallel_schedule", "parallelism.partition"
METHOD, BATCH = "freezing.method", "training.local_batch_size"
# The run whose times choose split and schedule.
TIMES = "times"
_TOLD = tomllib.loads(resources.files(__package__).joinpath("links.toml").read_text())["links"]
LINKS = tuple(told["name"] for told in _TOLD)


@dataclass(frozen=True)
class Link:
    """A link of those asked for."""

    name: str
    title: str  # for readers
    over: str  # the link that it is set against; "" for the first one
    keys: Mapping[str, Any]  # its own, and those of all links below it
    # Those of which the fastest is taken, by measured times; empty where the keys say which.
    schedules: Sequence[str] = ()
    partitions: Sequence[str] = ()


def read_links(names: Sequence[str]) -> dict[str, Link]:
    """Return the links of ``names``, in the order of the chain."""
    if unknown := [name for name in names if name not in LINKS]:
        raise ValueError(f"--links has {', '.join(unknown)}; links are {', '.join(LINKS)}")
    links: dict[str, Link] = {}
    for told in _TOLD:
        base = links.get(told.get("over", next(reversed(links), "")))
        over = "" if base is None else base.name if base.name in names else base.over
        known = {"keys": {}} if base is None else vars(base)
        keys = {**known["keys"], **told.get("keys", {})}
        links[told["name"]] = Link(**{**known, **told, "over": over, "keys": keys})
    asked = {name: link for name, link in links.items() if name in names}
    if more := [link.name for link in asked.values() if not link.over][1:]:
        raise ValueError(f"--links has {more[0]}, and nothing that it is set against; add plain")
    return asked


@dataclass(frozen=True)
class Packed:
    """What a packed sequence holds, in the mean."""

    rows: float
    targets: float  # learned tokens


def read_packed(settings: Settings) -> Packed:
    """Return the mean over the first packed sequences of the training data."""
    command = [sys.executable, "-m", "timelyfreeze", "samples", str(settings.config)]
    command += [f"--samples={_N_READ}", *settings.arguments, "--data.packing"]
    done = subprocess.run(command, cwd=ROOT, env=run_environment(os.environ, 1),
                          capture_output=True, text=True, check=False)  # fmt: skip
    counts = [tuple(map(int, pair)) for pair in _COUNTS.findall(done.stdout)]
    if done.returncode or not counts:
        said = (done.stderr.strip() or "error: no sequence").rpartition("error: ")[2]
        raise ValueError(f"a chain packs rows, and those of CONFIG cannot be: {said}")
    return Packed(*(sum(of) / len(counts) for of in zip(*counts, strict=True)))


def batch_of_rows(settings: Settings, packed: Packed) -> dict[str, int]:
    """Return the keys of batches with a row to a sequence, and as many rows as packed ones."""
    table, whole = config_table(settings.config), "training.global_batch_size"

    def told(key: str, default: int) -> int:
        return int(value_of(settings.arguments, table, key) or default)

    batch, size = told(BATCH, 8), told("parallelism.pipeline_parallel_microbatch_size", 1)
    n = size * max(1, round(batch * packed.rows / size))
    more = {whole: total * n // batch} if (total := told(whole, -1)) > 0 else {}
    return {BATCH: n, "validation.local_batch_size": n, **more}


def chain_jobs(
    links: Mapping[str, Link], seeds: Sequence[int], settings: Settings, nproc: int,
    packed: Packed, *, n_steps: int | None = None, memory_gib: float | None = None,
) -> list[Job]:  # fmt: skip
    """Return the runs in their order: every second turn backwards, so that drifts cancel.

    ``n_steps`` are those of links that freeze nothing, where times alone are asked.
    """
    table, ramp = config_table(settings.config), "freezing.last_ramp_step"

    def job(link: Link, path: Path, seeded: Mapping[str, int], method: str) -> Job:
        # Against the trainer's arguments, as values fitted to other runs.
        fixed = {} if link.keys["data.packing"] else batch_of_rows(settings, packed)
        if not seeded and (last := value_of(settings.arguments, table, ramp)) is not None:
            fixed["training.steps"] = int(last) + 1
        if n_steps is not None and method in ("none", LORA):
            fixed["training.steps"] = n_steps
        keys = {**link.keys, METHOD: method}
        chooses = link if seeded and link.schedules else None
        if chooses:  # another cut beside a partition is refused
            keys = {key: value for key, value in keys.items() if not key.endswith("_less_layers")}
        told = {"schedule": keys[SCHEDULE], "method": method, "keys": {**keys, **fixed}}
        fit = partial(_fitted, fixed=fixed, link=chooses, memory_gib=memory_gib)
        record = {**told, "seed": next(iter(seeded.values()), None)}
        return Job(str(path), path, nproc, {**keys, **seeded}, record, fit)

    jobs = []
    if timed := next((link for link in links.values() if link.schedules), None):
        jobs.append(job(timed, Path(TIMES), {}, "timelyfreeze"))
    for turn, seed in enumerate(seeds):
        seeded = dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), seed)
        for link in list(links.values())[:: -1 if turn % 2 else 1]:
            jobs.append(job(link, link_folder(link.name, seed), seeded, link.keys[METHOD]))
    return jobs


def link_folder(name: str, seed: int) -> Path:
    """Return the folder of a link's run, below the output."""
    return Path(name, f"seed_{seed}")


def _fitted(
    output: Path, *, fixed: Mapping[str, Any], link: Link | None, memory_gib: float | None
) -> dict[str, Any]:
    """Return ``fixed`` keys, and what a link chooses by the times measured below ``output``."""
    if link is None:
        return {**fixed}
    run = finished_run(output / TIMES)
    if run is None:
        raise ValueError(f"{output / TIMES} has no finished run, whose times are needed")
    file = read_bounds_file(run.folder / "bounds.json")
    best = fastest(file, link.schedules, link.partitions, memory_gib)
    profile = {"parallelism.partition_profile": str(file.path)}
    return {**fixed, SCHEDULE: best.schedule, PARTITION: best.split, **profile}


def fastest(
    file: BoundsFile, schedules: Sequence[str], splits: Sequence[str], memory_gib: float | None
) -> Case:
    """Return the case with the shortest batch without freezing, of those that fit the memory."""
    n_ranks, processors = file.n_ranks or file.n_stages, file.metadata.processors
    grid = Grid(tuple(schedules), (0.0,), (file.n_microbatches,), tuple(splits), n_ranks,
                n_processors=processors)  # fmt: skip
    cases = [case for case in answer(file, grid).cases
             if memory_gib is None or _gib(file, case, n_ranks) <= memory_gib]  # fmt: skip
    if not cases:
        raise ValueError(f"none of {', '.join(schedules)} fits into --memory-gib {memory_gib}")
    return min(cases, key=lambda case: case.step_ms)


def _gib(file: BoundsFile, case: Case, n_ranks: int) -> float:
    """Return the memory of the fullest rank; a ValueError where the file does not tell."""
    if file.metadata.memory is None or case.layers is None:
        raise ValueError(f"{file.path} does not tell the memory that --memory-gib limits")
    order = order_of(case.schedule, n_ranks, file.n_stages, case.n_microbatches)
    return max(memory_load(file.metadata.memory, order).of_split(case.layers)) / 2**30
