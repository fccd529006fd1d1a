"""The pipeline DAG: dependencies of actions, and consequences of durations.

Implements arXiv:2602.05754, Sec. 3.2.1 and App. B. Notation: A actions, E edges.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule.order import Action, ActionKind, ScheduleError, ScheduleOrder
from timelyfreeze.settings import key

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class PipelineDag:
    """Precedence graph of a batch. Arrays over actions follow the order of ``actions``.

    Attributes:
        actions: The A nodes, rank by rank in execution order.
        edges: int64, shape [E, 2]. Row (i, j): action j starts only after action i has finished. No
            row occurs twice.
        topological: int64, shape [A]. The action indices, after all their predecessors.
        stages: int64, shape [A]. Stage of each action.
        ranks: int64, shape [A]. Rank of each action.
        freezable: bool, shape [A]. Whether freezing can shorten the action.
        n_stages: Number of stages S.
    """

    actions: tuple[Action, ...]
    edges: NDArray[np.int64]
    topological: NDArray[np.int64]
    stages: NDArray[np.int64]
    ranks: NDArray[np.int64]
    freezable: NDArray[np.bool_]
    n_stages: int

    @cached_property
    def index(self) -> Mapping[Action, int]:
        """Position of each action in ``actions``."""
        return {action: i for i, action in enumerate(self.actions)}

    @cached_property
    def incoming(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Predecessors of each action, with the index of the edge, shape [A]."""
        lists: list[list[tuple[int, int]]] = [[] for _ in self.actions]
        for edge, (i, j) in enumerate(self.edges.tolist()):
            lists[j].append((i, edge))
        return tuple(map(tuple, lists))

    @cached_property
    def receiving(self) -> NDArray[np.bool_]:
        """Actions on another rank's message, bool, shape [A]."""
        rank_of = dict(zip(self.stages.tolist(), self.ranks.tolist(), strict=True))
        # A weight backward works on what its own stage has kept.
        towards = {ActionKind.FORWARD: -1, ActionKind.WEIGHT_BACKWARD: 0}
        senders = [
            rank_of.get(action.stage + towards.get(action.kind, 1), rank)
            for action, rank in zip(self.actions, self.ranks.tolist(), strict=True)
        ]
        return _read_only(np.array(senders, dtype=np.int64) != self.ranks)


def build_dag(order: ScheduleOrder) -> PipelineDag:
    """Connect the actions of a schedule by all dependencies.

    Edges, with m a microbatch and s a stage (App. B, rules 2 to 4; rule 4 contains the first half
    of rule 2 because a stage lives on a single rank):

    - consecutive actions of a rank;
    - F(m, s) -> F(m, s+1): activations;
    - B or I(m, s) -> B or I(m, s-1): gradients, whichever of the two a stage runs;
    - F(m, s) -> B(m, s), or F(m, s) -> I(m, s) -> W(m, s), within a stage.

    Source and destination are not nodes here. They weigh nothing, and App. B's single edge into the
    destination, from the first stage's last backward, misses schedules in which another rank ends
    last (zero-bubble schedules end in W on every rank). So an action without predecessors starts at
    0 and the batch ends with its last action, as with edges from the source to all and from all to
    the destination.

    Args:
        order: A checked schedule.

    Raises:
        ScheduleError: If the actions wait for each other in a circle, as a schedule that hangs; the
            message names the actions of a circle.
    """
    return connect(order.ranks, dependencies(order), order.n_stages)


def dependencies(order: ScheduleOrder) -> list[tuple[Action, Action]]:
    """Return the edges with a result: between stages and within a stage."""
    actions = {action for row in order.ranks for action in row}
    pairs: list[tuple[Action, Action]] = []
    for stage in range(order.n_stages):
        for microbatch in range(order.n_microbatches):
            forward, full, inputs, weights = (Action(stage, k, microbatch) for k in ActionKind)
            backward = full if full in actions else inputs
            pairs.append((forward, backward))
            if backward is inputs:
                pairs.append((inputs, weights))
            if stage > 0:
                pairs.append((Action(stage - 1, ActionKind.FORWARD, microbatch), forward))
                below = Action(stage - 1, ActionKind.FULL_BACKWARD, microbatch)
                if below not in actions:
                    below = Action(stage - 1, ActionKind.INPUT_BACKWARD, microbatch)
                pairs.append((backward, below))
    return pairs


def connect(
    ranks: Sequence[Sequence[Action]], waits: Iterable[tuple[Action, Action]], n_stages: int
) -> PipelineDag:
    """Return the graph of waiting actions, as ``build_dag`` for a single batch.

    Ranks run their actions in order, and may have none; of a pair of ``waits`` the second waits for
    the first, besides neighbours on a rank.
    """
    actions = tuple(action for row in ranks for action in row)
    index = {action: i for i, action in enumerate(actions)}
    pairs = [*(pair for row in ranks for pair in pairwise(row)), *waits]
    edges = np.array(sorted({(index[a], index[b]) for a, b in pairs}), dtype=np.int64)
    edges = edges.reshape(-1, 2)
    return PipelineDag(
        actions=actions,
        edges=_read_only(edges),
        topological=_read_only(_topological(actions, edges)),
        stages=_read_only(np.array([a.stage for a in actions], dtype=np.int64)),
        ranks=_read_only(np.repeat(np.arange(len(ranks)), [len(row) for row in ranks])),
        freezable=_read_only(np.array([a.kind.freezable for a in actions], dtype=np.bool_)),
        n_stages=n_stages,
    )


def start_times(
    dag: PipelineDag, durations_ms: ArrayLike, delays_ms: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Earliest start of every action, Eq. 5: when all inputs have arrived.

    Args:
        dag: Precedence graph of A actions and E edges.
        durations_ms: Duration of each action, shape [A], milliseconds.
        delays_ms: Delay from the end of an edge's first action to the arrival at the second, shape
            [E], milliseconds; None for nothing.

    Returns:
        NDArray[float64]: Start times, shape [A], milliseconds from the start of the batch.

    Raises:
        ValueError: If a shape is not [A] or [E], or a time is negative or not finite.
    """
    durations = check_durations(dag, durations_ms)
    # Plain floats and tuples: one numpy call per node would cost more than the whole sweep.
    duration = durations.tolist()
    delays = check_delays(dag, delays_ms).tolist()
    start = [0.0] * len(duration)
    finish = [0.0] * len(duration)
    for j in dag.topological.tolist():
        begin = 0.0
        for i, edge in dag.incoming[j]:
            if finish[i] + delays[edge] > begin:
                begin = finish[i] + delays[edge]
        start[j] = begin
        finish[j] = begin + duration[j]
    return np.array(start, dtype=np.float64)


def makespan(
    dag: PipelineDag, durations_ms: ArrayLike, delays_ms: ArrayLike | None = None
) -> float:
    """Batch time P_d, milliseconds: when the last action finishes; arguments as ``start_times``."""
    start = start_times(dag, durations_ms, delays_ms)
    return float(np.max(start + np.asarray(durations_ms, np.float64)))


def critical_positions(
    dag: PipelineDag, end_ms: ArrayLike, delays_ms: ArrayLike | None = None
) -> tuple[int, ...]:
    """Return the critical chain of a batch, by position in ``dag.actions``.

    From the action with the last end back to its latest input, and so on. Uses the ends of actions,
    shape [A], not their durations, and so holds for measured batches and shared processors.
    """
    end, delays = np.asarray(end_ms, np.float64), check_delays(dag, delays_ms)
    chain = [int(np.argmax(end))]
    while before := dag.incoming[chain[-1]]:
        chain.append(max(before, key=lambda pair: end[pair[0]] + delays[pair[1]])[0])
    return tuple(reversed(chain))


def check_durations(
    dag: PipelineDag, durations_ms: ArrayLike, name: str = "durations_ms"
) -> NDArray[np.float64]:
    """Return ``durations_ms`` as a float64 array, shape [A], after checking it against ``dag``.

    The error's text calls them ``name``.
    """

    def title(action: int) -> str:
        return f"{name} of action {dag.actions[action]}"

    return _checked(durations_ms, name, len(dag.actions), "actions", title)


def edge_delays(
    dag: PipelineDag, p2p_latency_ms: Mapping[tuple[int, int], float]
) -> NDArray[np.float64]:
    """Return the message time of each edge, shape [E], milliseconds.

    Latencies are by sending and receiving rank, 0 where missing; edges within a rank carry no
    message.
    """
    links = dag.ranks[dag.edges]
    return np.array(
        [0.0 if a == b else p2p_latency_ms.get((a, b), 0.0) for a, b in links.tolist()],
        dtype=np.float64,
    )


def check_delays(dag: PipelineDag, delays_ms: ArrayLike | None) -> NDArray[np.float64]:
    """Return ``delays_ms``, 0 for None, as a float64 array after checking it against ``dag``."""
    if delays_ms is None:
        return np.zeros(len(dag.edges))

    def title(edge: int) -> str:
        before, after = dag.edges[edge]
        return f"the delay from {dag.actions[before]} to {dag.actions[after]}"

    return _checked(delays_ms, "delays_ms", len(dag.edges), "edges", title)


def _checked(
    times_ms: ArrayLike, name: str, n: int, things: str, title: Callable[[int], str]
) -> NDArray[np.float64]:
    times = np.asarray(times_ms, dtype=np.float64)
    if times.shape != (n,):
        raise ValueError(
            f"{name} has shape {times.shape}; it needs one number for each of the {n} {things}"
        )
    bad = np.flatnonzero(~(np.isfinite(times) & (times >= 0.0)))
    if bad.size:
        raise ValueError(
            f"{title(bad[0])} is {times[bad[0]]} ms; it must be finite and not negative"
        )
    return times


def _read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    array.setflags(write=False)
    return array


def topological_order(n_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return nodes after all their predecessors; a CycleError names a circle."""
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(n_nodes), ()))
    for i, j in edges:
        sorter.add(j, i)
    return list(sorter.static_order())


def _topological(actions: tuple[Action, ...], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    try:
        return np.array(topological_order(len(actions), edges.tolist()), dtype=np.int64)
    except CycleError as error:
        circle = " -> ".join(str(actions[i]) for i in error.args[1])
        circle = textwrap.shorten(circle, 500, placeholder=" ...")
        raise ScheduleError(
            f"the schedule would hang: each of these actions waits for the one before it: "
            f"{circle}; reorder them ({key('schedule_csv')})"
        ) from None
