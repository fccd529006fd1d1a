"""The freezing states that the processes of a checkpoint saved, for as many processes as there are.

Each process saves its own, ``rank_<number>``: what it measured is its own. All else is the same on
every process that holds the same stages: replicas, and those that split a stage between them. So
where as many processes go on, each takes its own state; otherwise one that all of a stage share, in
which the slowest process's times count, as they do in a plan. States are the plain data of
``FreezeController``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.schedule import Action, ScheduleOrder, order_from_csv, parse_action
from timelyfreeze.settings import key
from timelyfreeze.timing import Samples, median_of_each, slowest

RANK_KEY = "rank_"


def begin_anew() -> str:
    """Return how a run goes on without the state of a checkpoint, the end of an error."""
    return f"to begin freezing anew, {key('begin_anew')}"


def rank_keys(keys: Collection[str]) -> list[str]:
    """Return those of ``keys`` that states of processes stand under, in the order of processes."""
    numbers = [key.removeprefix(RANK_KEY) for key in keys if key.startswith(RANK_KEY)]
    return [f"{RANK_KEY}{number}" for number in sorted(int(n) for n in numbers if n.isdecimal())]


def saved_states(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all processes, in their order."""
    keys = rank_keys(state_dict)
    if not keys or keys != [f"{RANK_KEY}{number}" for number in range(len(keys))]:
        raise ValueError(
            f"the checkpoint's freezing state has {sorted(state_dict)}, of which the states of "
            f"processes must be {RANK_KEY}0, {RANK_KEY}1 and so on; {begin_anew()}"
        )
    return [json.loads(state_dict[key]) for key in keys]


def held_stages(states: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Return the stages of each process, ascending: those that it counts the updates of."""
    return [tuple(sorted(map(int, state["tally"]))) for state in states]


def pipeline_error(
    states: Sequence[Mapping[str, Any]], n_ranks: int, n_microbatches: int
) -> str | None:
    """Return why a pipeline of this size cannot go on from all the states; None if it can."""
    held = held_stages(states)
    if len(set(held)) != n_ranks:
        return (
            f"the checkpoint was saved by a pipeline of {len(set(held))} ranks, which hold the "
            f"stages {_listed(held)}; this run has {key('n_ranks')} {n_ranks}; "
            f"resume with {key('pipeline')}, or, {begin_anew()}"
        )
    saved = saved_microbatches(states)
    if saved not in (None, n_microbatches):
        return (
            f"the checkpoint's times and plan are those of {saved} microbatches in a batch, this "
            f"run has {n_microbatches}; resume with as many "
            f"({key('microbatches')}), or, {begin_anew()}"
        )
    return None


def check_same_pipeline(states: Sequence[Mapping[str, Any]], order: ScheduleOrder) -> None:
    """Refuse states of all processes of a pipeline with other stages, or of other microbatches."""
    error = pipeline_error(states, order.n_ranks, order.n_microbatches)
    if error is not None:
        raise ValueError(error)
    held, ours = held_stages(states), stages_of_ranks(order)
    if set(held) != set(ours):
        raise ValueError(
            f"the checkpoint's pipeline ranks hold the stages {_listed(held)}, those of this run "
            f"{_listed(ours)}; resume with {key('pipeline')}, or, {begin_anew()}"
        )


def saved_microbatches(states: Sequence[Mapping[str, Any]]) -> int | None:
    """Return of how many microbatches a plan or times are; None where there is neither yet."""
    planners = [state["planner"] for state in states if "planner" in state]
    for planner in planners:
        if "solved" in planner:
            return order_from_csv(planner["solved"]["order"]).n_microbatches
    numbers = {
        parse_action(text).microbatch
        for planner in planners
        for samples in planner["samples"].values()
        for times in [*samples["warm"], *samples["cold"]]
        for text in times
    }
    return 1 + max(numbers) if numbers else None


def stages_of_ranks(order: ScheduleOrder) -> list[tuple[int, ...]]:
    """Return the stages of each pipeline rank, ascending."""
    holders = order.stage_to_rank
    return [
        tuple(stage for stage, rank in enumerate(holders) if rank == holder)
        for holder in range(order.n_ranks)
    ]


def state_of(
    states: Sequence[Mapping[str, Any]], stages: tuple[int, ...], number: int, n_processes: int
) -> Mapping[str, Any]:
    """Return the state that a process goes on from."""
    held = held_stages(states)
    if len(states) == n_processes and held[number] == stages:
        return states[number]
    return merge_replicas([s for s, of in zip(states, held, strict=True) if of == stages])


def merge_replicas(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one state for all processes, one or more, that hold the same stages."""
    merged = states[0]
    if len(states) == 1 or "planner" not in merged:
        return merged
    samples = merge_each_phase(states, _slowest_samples)
    links = slowest(
        {(a, b): transfer_ms for a, b, transfer_ms in state["planner"]["p2p_latency_ms"]}
        for state in states
    )
    p2p_latency_ms = [[*link, transfer_ms] for link, transfer_ms in links.items()]
    planner = {**merged["planner"], "samples": samples, "p2p_latency_ms": p2p_latency_ms}
    return {**merged, "planner": planner}


def merge_each_phase(
    states: Sequence[Mapping[str, Any]], merge: Callable[[Sequence[Samples]], Samples]
) -> dict[str, Any]:
    """Return the times of several processes, by phase, as ``merge`` makes those of one of them."""
    merged = {}
    for phase in states[0]["planner"]["samples"]:
        processes = [read_dataclass(Samples, s["planner"]["samples"][phase], phase) for s in states]
        for half in ("warm", "cold"):
            counts = [len(getattr(samples, half)) for samples in processes]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"processes of the checkpoint that ran the same batches have measured {counts} "
                    f"{half} batches, and must have measured equally many; {begin_anew()}"
                )
        merged[phase] = to_plain(merge(processes))
    return merged


def _slowest_samples(replicas: Sequence[Samples]) -> Samples:
    """Return the times of the process on which an action took longest, for each action.

    A batch lasts as long as on the process on which it lasted longest.
    """
    spans_ms = zip(*(samples.spans_ms for samples in replicas), strict=True)
    return Samples(
        _slowest_times([samples.warm for samples in replicas]),
        _slowest_times([samples.cold for samples in replicas]),
        [max(spans) for spans in spans_ms],
    )


def _slowest_times(replicas: Sequence[list[dict[Action, float]]]) -> list[dict[Action, float]]:
    """Return the times of each batch: of each action, on the process whose median is highest."""
    medians_ms = [median_of_each(batches) for batches in replicas]
    holders = {
        action: max(range(len(replicas)), key=lambda number: medians_ms[number][action])
        for action in medians_ms[0]
    }
    return [
        {action: times_ms[holders[action]][action] for action in times_ms[0]}
        for times_ms in zip(*replicas, strict=True)
    ]


def _listed(held: Sequence[tuple[int, ...]]) -> str:
    return " | ".join(", ".join(map(str, stages)) for stages in sorted(set(held)))
