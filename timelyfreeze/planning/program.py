"""The linear program from duration bounds to freeze ratios, as sparse arrays.

Implements arXiv:2602.05754, Sec. 3.2.2: Eq. 6 under constraints [1] to [4]. Notation: A actions,
E edges, S stages, R freezable actions, K actions without successors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import PipelineDag, topological_order
from timelyfreeze.settings import key, ratio_errors
from timelyfreeze.timing import DurationBounds, shared_processors, validate_bounds


class LpError(RuntimeError):
    """The solver stopped without an optimum.

    Attributes:
        status: The solver's own word for why, for example ``Time limit reached``.
    """

    def __init__(self, message: str, *, status: str = "") -> None:  # pickle has the message alone
        """Keep the status beside the message."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class FreezeLp:
    """The linear program as sparse arrays: minimise a cost over x, rows and columns bounded.

    Columns: start times P_i of the A actions, P_d, then ratios r_i of the R freezable actions.
    Rows: one per edge [1] not implied by others, one per last action (its edge to the destination),
    one per stage [4], and one for all work if ranks share processors. Times are divided by
    ``scale_ms``.
    """

    row_start: NDArray[np.int32]  # int32, shape [rows + 1]. Where each row begins in the next two
    columns: NDArray[np.int32]  # int32. Column of each nonzero
    values: NDArray[np.float64]  # float64. The nonzeros
    row_lower: NDArray[np.float64]  # shape [rows]
    row_upper: NDArray[np.float64]  # shape [rows]
    column_lower: NDArray[np.float64]  # shape [A + 1 + R]
    column_upper: NDArray[np.float64]  # shape [A + 1 + R]
    freezable: NDArray[np.int64]  # int64, shape [R]. Action index of each ratio column
    # What is before and after in each of the first rows: actions, or A for the destination; and
    # which ratio shortens the first one, -1 for none, by how much.
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    ratio: NDArray[np.int64]
    saved: NDArray[np.float64]
    # shape [S]. Upper bound of each stage's sum of ratios, the right side of [4]
    caps: NDArray[np.float64]
    n_actions: int  # A; also the column of P_d
    n_edges: int  # E
    n_precedence: int  # how many rows are of the first two kinds
    n_stages: int  # S
    scale_ms: float  # milliseconds per unit of time

    def stopped(self, how: str, status: str, short_of: str) -> LpError:
        """Return the error of a solver ended with ``status``."""
        return LpError(
            f"the freeze-ratio program ({how}) ended with status {status!r}, {short_of}; it has "
            f"A={self.n_actions} actions, E={self.n_edges} edges, S={self.n_stages} stages",
            status=status,
        )


def build_lp(
    dag: PipelineDag,
    bounds: DurationBounds,
    max_freeze_ratio: float | Sequence[float],
    n_processors: float | None = None,
) -> FreezeLp:
    """Build Eq. 6 for a schedule, as sparse arrays, without solving.

    With the durations replaced by w_i = w_i^max - r_i (w_i^max - w_i^min), constraint [2] becomes 0
    <= r_i <= 1, and [1] becomes P_j - P_i + r_i (w_i^max - w_i^min) >= w_i^max. Constraint [4]
    counts a stage's freezable actions only, so ``max_freeze_ratio`` is a cap on their mean ratio.
    An action with equal bounds keeps r_i = 0 but still counts.

    Where ranks share ``n_processors``, another row keeps the batch from ending before all work is
    done: n_processors * P_d >= sum of w_i over all actions.

    Times are measured in units of the longest action, so the program, and with it the ratios, do
    not depend on whether a run's actions last microseconds or minutes. There are at most E + K + S
    rows, and one more if ranks share processors; A + 1 + R columns.
    """
    validate_bounds(dag, bounds)
    caps = np.asarray(max_freeze_ratio, dtype=np.float64)
    if errors := list(ratio_errors(caps.tolist(), dag.n_stages)):
        raise ValueError("; ".join(errors))
    caps = np.broadcast_to(caps, (dag.n_stages,))
    scale = float(np.max(bounds.max_ms))
    if scale == 0.0:
        raise ValueError(
            "every action lasts 0 ms; there is nothing to plan; measure again with a later "
            f"{key('last_monitor_step')}"
        )
    n_actions, n_edges = len(dag.actions), len(dag.edges)
    longest = bounds.max_ms / scale
    span = longest - bounds.min_ms / scale
    freezable = np.flatnonzero(dag.freezable)
    ratio_column = np.full(n_actions, -1, dtype=np.int64)
    ratio_column[freezable] = n_actions + 1 + np.arange(len(freezable))

    # Edges within a rank that leap over actions follow from others.
    before, after = dag.edges[:, 0], dag.edges[:, 1]
    implied = (dag.ranks[before] == dag.ranks[after]) & (after - before != 1)
    last = np.setdiff1d(np.arange(n_actions), before[~implied])
    before = np.concatenate([before[~implied], last])
    after = np.concatenate([after[~implied], np.full(len(last), n_actions)])
    n_precedence = len(before)
    row = np.arange(n_precedence)
    saved = span[before]
    shortened = np.flatnonzero(saved > 0.0)  # explicit zeros would only slow the solver
    parts = [  # row, column and value of nonzeros
        (row, after, np.ones(n_precedence)),
        (row, before, -np.ones(n_precedence)),
        (row[shortened], ratio_column[before[shortened]], saved[shortened]),
        (n_precedence + dag.stages[freezable], ratio_column[freezable], np.ones(len(freezable))),
    ]
    n_rows = n_precedence + dag.n_stages
    shared = shared_processors(dag, n_processors)
    work: list[float] = []
    if shared is not None:
        parts += [
            (np.full(len(freezable), n_rows), ratio_column[freezable], span[freezable]),
            (np.array([n_rows]), np.array([n_actions]), np.array([shared])),
        ]
        work = [float(longest.sum())]
        n_rows += 1
    rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    by_row = np.argsort(rows, kind="stable")
    row_start = np.cumsum([0, *np.bincount(rows, minlength=n_rows)], dtype=np.int32)

    earliest = longest[before]
    delays = bounds.delays_ms(dag)[~implied] / scale
    earliest[: len(delays)] += delays
    infinite = np.full(n_rows, np.inf)
    n_freezable = np.bincount(dag.stages[freezable], minlength=dag.n_stages)
    return FreezeLp(
        row_start=row_start,
        columns=columns[by_row].astype(np.int32),
        values=values[by_row],
        row_lower=np.concatenate([earliest, -infinite[: dag.n_stages], work]),
        row_upper=np.concatenate(
            [infinite[:n_precedence], caps * n_freezable, infinite[: len(work)]]
        ),
        column_lower=np.zeros(n_actions + 1 + len(freezable)),
        column_upper=np.concatenate(
            [np.full(n_actions + 1, np.inf), np.where(span[freezable] > 0.0, 1.0, 0.0)]
        ),
        freezable=freezable,
        before=before,
        after=after,
        ratio=np.where(saved > 0.0, ratio_column[before] - n_actions - 1, -1),
        saved=saved,
        caps=caps * n_freezable,
        n_actions=n_actions,
        n_edges=n_edges,
        n_precedence=n_precedence,
        n_stages=dag.n_stages,
        scale_ms=scale,
    )


Floats = NDArray[np.float64]

# A start time is a sum of some hundred durations; this is far above its rounding, and far below
# what could be measured.
_ROUNDING = 1e-10


class PrecedenceRows:
    """The rows [1] of a program: P_after - P_before + saved * r >= least."""

    def __init__(self, lp: FreezeLp) -> None:
        self._n_nodes = lp.n_actions + 1
        self._least, self._saved, self._ratio = lp.row_lower[: len(lp.before)], lp.saved, lp.ratio
        self._after = lp.after.tolist()
        self._rows_from: list[list[int]] = [[] for _ in range(self._n_nodes)]
        for e, node in enumerate(lp.before.tolist()):
            self._rows_from[node].append(e)
        pairs = zip(lp.before.tolist(), self._after, strict=True)
        self._order = topological_order(self._n_nodes, pairs)

    def _lengths(self, ratios: Floats) -> list[float]:
        # Rows without a ratio have -1 in its place.
        lengths = self._least - self._saved * np.append(ratios, 0.0)[self._ratio]
        return list(lengths.tolist())

    def earliest(self, ratios: Floats) -> Floats:
        """Return the earliest start of every action, and as last number the batch's end."""
        lengths = self._lengths(ratios)
        start = [0.0] * self._n_nodes
        for node in self._order:
            for e in self._rows_from[node]:
                start[self._after[e]] = max(start[self._after[e]], start[node] + lengths[e])
        return np.array(start)

    def latest(self, ratios: Floats, end: float) -> Floats:
        """Return the latest starts of actions for a batch ending at ``end``."""
        lengths = self._lengths(ratios)
        start = [end] * self._n_nodes
        for node in reversed(self._order):
            for e in self._rows_from[node]:
                start[node] = min(start[node], start[self._after[e]] - lengths[e])
        return np.array(start)

    def unfreeze(
        self, ratios: Floats, may_fall: NDArray[np.bool_], *, whole: bool = False
    ) -> Floats:
        """Lower ratios, shape [R], as far as the batch ends no later.

        In the order of execution, actions take the free time before the latest start of their
        successors. Afterwards no ratio can fall alone. Only those of ``may_fall`` change; with
        ``whole`` they fall to 0 or not at all.
        """
        latest = self.latest(ratios, float(self.earliest(ratios)[-1])).tolist()
        start = [0.0] * self._n_nodes
        least, saved, ratio = self._least.tolist(), self._saved.tolist(), self._ratio.tolist()
        lowered = ratios.tolist()
        for node in self._order:
            rows = self._rows_from[node]
            own = ratio[rows[0]] if rows else -1
            if own >= 0 and may_fall[own]:
                needed = max(
                    (least[e] + start[node] - latest[self._after[e]]) / saved[e] for e in rows
                )
                if needed <= _ROUNDING:
                    lowered[own] = 0.0
                elif not whole:
                    lowered[own] = min(lowered[own], needed)
            for e in rows:
                length = least[e] - (saved[e] * lowered[own] if own >= 0 else 0.0)
                start[self._after[e]] = max(start[self._after[e]], start[node] + length)
        return np.array(lowered)

    def raised(self, duals: Floats) -> Floats:
        """Raise dual values of rows, none below 0, until the flow is balanced at every action.

        Duals are a flow along the edges. Where no action keeps a part, start times, which have no
        upper bound, take nothing from the lower bound on P_d.
        """
        flow = duals.tolist()
        arriving = [0.0] * self._n_nodes
        for node in self._order:
            rows = self._rows_from[node]
            leaving = sum(flow[e] for e in rows)
            if rows and leaving < arriving[node]:
                for e in rows:
                    fraction = flow[e] / leaving if leaving else 1.0 / len(rows)
                    flow[e] = fraction * arriving[node]
            for e in rows:
                arriving[self._after[e]] += flow[e]
        return np.array(flow)
