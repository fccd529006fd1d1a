"""What a checkpoint holds of freezing: the parts of a rank's controller, as text and tensors.

Each process saves its own, ``rank_<number>``: what it measured is its own. All else is the same on
every process that holds the same stages: replicas, and those that split a stage between them. So
where as many processes go on, each takes its own state; otherwise one that all of a stage share, in
which the slowest process's times count, as they do in a plan.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime import Exchange, StepPart
from timelyfreeze.schedule import (
    Action,
    ScheduleOrder,
    order_from_csv,
    parse_action,
    stages_of_ranks,
)
from timelyfreeze.settings import begin_anew, key
from timelyfreeze.timing import Samples, median_of_each, slowest

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part", bound=StepPart)

RANK_KEY = "rank_"


class Kind(Enum):
    """What a value of a process's state is to other processes."""

    SAME = "same"  # equal on all of them
    BY_STAGE = "by_stage"  # {stage: value} of the stages that a process holds
    SUMMED = "summed"  # numbers that count for the run once they are added up
    TIMES = "times"  # of the actions of a process; replicas have measured others


# Values that are not the same on all processes, by the name that a part gives them.
KINDS = {
    "applied": Kind.SUMMED,
    "tally": Kind.BY_STAGE,
    "energy": Kind.BY_STAGE,
    "losses": Kind.BY_STAGE,
    "planner": Kind.TIMES,
}
# From the values of several processes to one.
Rules = Mapping[Kind, Callable[[list[Any]], Any]]


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
    held, ours = held_stages(states), stages_of_ranks(order.stage_to_rank)
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


def state_of(
    states: Sequence[Mapping[str, Any]], stages: tuple[int, ...], number: int, n_processes: int
) -> Mapping[str, Any]:
    """Return the state that a process goes on from."""
    held = held_stages(states)
    if len(states) == n_processes and held[number] == stages:
        return states[number]
    return merge_replicas([s for s, of in zip(states, held, strict=True) if of == stages])


def combined(states: Sequence[Mapping[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return one state for several, each value by the rule for its kind; the first has the rest."""
    values: dict[str, list[Any]] = {}
    for state in states:
        for name, value in state.items():
            values.setdefault(name, []).append(value)
    kinds = {name: KINDS.get(name, Kind.SAME) for name in values}
    return {name: rules.get(kinds[name], itemgetter(0))(found) for name, found in values.items()}


def merge_replicas(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one state for all processes, one or more, that hold the same stages."""
    rules: Rules = {Kind.TIMES: lambda found: merge_times(found, _slowest_samples, slowest)}
    return states[0] if len(states) == 1 else combined(states, rules)


def merge_times(
    processes: Sequence[Mapping[str, Any]],
    merge: Callable[[Sequence[Samples]], Samples],
    join: Callable[[Sequence[Mapping[tuple[int, int], float]]], Mapping[tuple[int, int], float]],
) -> dict[str, Any]:
    """Return a planner's state: times of each phase merged, those of links joined."""
    links = [{(a, b): ms for a, b, ms in each["p2p_latency_ms"]} for each in processes]
    return {
        **processes[0],
        "samples": merge_each_phase(processes, merge),
        "p2p_latency_ms": [[*link, ms] for link, ms in join(links).items()],
    }


def merge_each_phase(
    planners: Sequence[Mapping[str, Any]], merge: Callable[[Sequence[Samples]], Samples]
) -> dict[str, Any]:
    """Return the times of several processes, by phase, as ``merge`` makes those of one of them."""
    merged = {}
    for phase in planners[0]["samples"]:
        processes = [read_dataclass(Samples, each["samples"][phase], phase) for each in planners]
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
    """Return each action's times on the process that took longest, and the longest spans."""
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


@dataclass
class FreezingState:
    """Saves and restores what a rank knows."""

    declared: ScheduleOrder  # order of the whole pipeline, as declared
    stages: tuple[int, ...]  # indexes of the stages that this process holds
    exchange: Exchange  # says which process this is
    parts: Sequence[StepPart]  # of a step
    # Whether the run may come from another pipeline, and plan again; set it before state is loaded.
    moves: bool = False

    def _part(self, kind: type[_Part]) -> _Part | None:
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def save(self) -> dict[str, Any]:
        """Return ``{"rank_<r>": text}`` for a checkpoint.

        The text is JSON with the plain data of all parts: under a key of this rank's own, since
        samples differ from rank to rank. Besides, the parts' tensors, each under its prefix and
        name.
        """
        state: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for part in self.parts:
            state |= part.plain_state()
            tensors |= _named(part.prefix, part.tensor_state())
        own = self.of_processes(state).items()
        return {**{f"{RANK_KEY}{number}": json.dumps(each) for number, each in own}, **tensors}

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a state with ``keys``: those of all processes, score vectors."""
        mine = [f"{RANK_KEY}{self.exchange.rank}"]
        room: dict[str, Any] = dict.fromkeys(rank_keys(keys) or mine, "")
        for part in self.parts:
            saved = [k.removeprefix(part.prefix) for k in keys if k.startswith(part.prefix)]
            room |= _named(part.prefix, part.tensors_to_load(saved))
        return room

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` returned on all processes."""
        state = self._read(state_dict)
        for part in self.parts:
            part.load_plain_state(state)
            mine = {k: v for k, v in state_dict.items() if k.startswith(part.prefix)}
            part.load_tensor_state({k.removeprefix(part.prefix): v for k, v in mine.items()})

    def _read(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this process's part of what :meth:`save` returned on all, now or another number.

        Where it ``moves`` a plan of another pipeline may be left behind; a policy without a plan
        goes on with any pipeline anyway.
        """
        states = saved_states(state_dict)
        found = {"policy"} & set(states[0])
        if "planner" in states[0] or (self.moves and "elsewhere" in states[0]):
            found.add("planner")
        checks, plans = self._part(PolicyRunner), self._part(Planner) is not None
        if found != {name for name, has in (("planner", plans), ("policy", checks)) if has}:
            raise ValueError(
                f"the checkpoint was saved under another {key('method')} (it has the state of: "
                f"{', '.join(sorted(found))}); resume with the same one, or, {begin_anew()}"
            )
        if checks is None or (plans and not self.moves):
            check_same_pipeline(states, self.declared)
            return self.own(states)
        if self._is_of_here(states, checks):
            state = self.own(states)
        else:
            logger.info(
                "Freezing goes on with another pipeline: of each tensor what was known of it"
            )
            number, size = self.exchange.rank, self.exchange.size
            state = recut(states, checks.layout, self.stages, number, size)
        if not plans:
            return state
        planned = states[0].get("elsewhere", states)
        state = {k: v for k, v in state.items() if k not in ("planner", "elsewhere")}
        if self._is_of_here(planned, checks):
            return {**state, "planner": self.own(planned)["planner"]}
        return {**state, "elsewhere": planned}

    def _is_of_here(self, states: Sequence[Mapping[str, Any]], checks: PolicyRunner) -> bool:
        """Return whether states are those of a pipeline with the same stages and microbatches."""
        is_same = set(held_stages(states)) == set(stages_of_ranks(self.declared.stage_to_rank))
        is_as_long = saved_microbatches(states) in (None, self.declared.n_microbatches)
        return is_same and is_as_long and is_cut_alike(states, checks.layout)

    def of_processes(self, state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return {number of a process: its state} of what this process saves."""
        return {self.exchange.rank: state}

    def own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state that this process goes on from, of those of all that have saved one."""
        if len(states) != self.exchange.size:
            logger.info(
                "Freezing goes on with %d processes where %d have stopped; of the times that they "
                "have measured of a stage, the slowest count",
                self.exchange.size,
                len(states),
            )
        return state_of(states, self.stages, self.exchange.rank, self.exchange.size)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under their names in a checkpoint, which loads into them."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def is_cut_alike(states: Sequence[Mapping[str, Any]], layout: ModelLayout) -> bool:
    """Return whether each stage has as many tensors as when the states were saved."""
    saved = {stage: len(frozen) for stage, (_, frozen) in _tallies(states).items()}
    stages, counts = np.unique(layout.stages, return_counts=True)
    return saved == dict(zip(stages.tolist(), counts.tolist(), strict=True))


def recut(
    states: Sequence[Mapping[str, Any]],
    layout: ModelLayout,
    stages: Sequence[int],
    number: int,
    n_processes: int,
) -> dict[str, Any]:
    """Return the state that a process goes on from with stages of its own.

    Counts of frozen tensors and gradient energies go where the tensors are: what stays frozen can
    not be measured again. The sums of the average freeze ratio are handed out evenly.
    """
    tallies = _tallies(states)
    # Stage after stage is the order of the model, wherever it is cut. Only tensors of a block that
    # is cut itself come in another one, and they freeze together.
    frozen = np.concatenate([np.array(of_stage, np.int64) for _, of_stage in tallies.values()])
    if len(frozen) != len(layout.names):
        raise ValueError(
            f"the checkpoint's freezing state is of {len(frozen)} tensors, the model has "
            f"{len(layout.names)}; resume with the same model, or, {begin_anew()}"
        )
    # Every stage runs every microbatch; a process that joined later has counted fewer.
    backwards = max(count for count, _ in tallies.values())
    state = combined(states, {Kind.SUMMED: lambda found: _share(found, number, n_processes)})
    state.pop("energy", None)
    state["tally"] = {str(s): [backwards, frozen[layout.of_stage(s)].tolist()] for s in stages}
    measured = [each.get("energy", {}) for each in states]
    energies = {int(s): found for of_stages in measured for s, found in of_stages.items()}
    if energies.keys() == tallies.keys():
        energy = np.array([each for s in tallies for each in energies[s]], dtype=object)
        state["energy"] = {str(s): energy[layout.of_stage(s)].tolist() for s in stages}
    losses = [loss for each in states for loss in each.get("losses", {}).values()]
    if losses:
        # Only who has the last stage takes them.
        state["losses"] = {str(stage): losses[0] for stage in stages}
    return state


def added(found: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums over processes."""
    return [sum(each) for each in zip(*found, strict=True)]


def _share(found: Sequence[Sequence[float]], number: int, n_processes: int) -> list[float]:
    frozen, elements = added(found)
    share, rest = divmod(elements, n_processes)
    return [frozen / n_processes, share + (number < rest)]


def _tallies(states: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, Sequence[int]]]:
    """Return {stage: (backwards, of each tensor in how many it was frozen)}, front to back."""
    by_stage = {int(s): (n, frozen) for each in states for s, (n, frozen) in each["tally"].items()}
    return dict(sorted(by_stage.items()))
