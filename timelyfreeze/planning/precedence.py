"""Schedules that follow from the precedence rows of the linear program, for given freeze ratios.

Works on the program's own rows, so that whatever they say (durations, times on edges) counts. Times
are in the program's unit. Notation: A actions; node A is the end of the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import FreezeLp

Floats = NDArray[np.float64]

# A start time is a sum of some hundred durations; this is far above its rounding, and far below
# what could be measured.
_ROUNDING = 1e-10


class PrecedenceRows:
    """The rows [1] of a program: P_after - P_before + saved * r >= least.

    Args:
        lp: The program.
    """

    def __init__(self, lp: FreezeLp) -> None:
        n_rows = lp.n_precedence
        row = np.repeat(np.arange(n_rows), np.diff(lp.row_start[: n_rows + 1]))
        columns, values = lp.columns[: len(row)], lp.values[: len(row)]
        is_ratio = columns > lp.n_actions
        after, before = ~is_ratio & (values > 0.0), ~is_ratio & (values < 0.0)
        for kind in (after, before):
            assert (row[kind] == np.arange(n_rows)).all()  # build_lp writes one into each row
        self._n_nodes = lp.n_actions + 1
        self._least = lp.row_lower[:n_rows]
        self._after = columns[after].tolist()
        self._ratio = np.full(n_rows, -1)
        self._ratio[row[is_ratio]] = columns[is_ratio] - self._n_nodes
        self._saved = np.zeros(n_rows)
        self._saved[row[is_ratio]] = values[is_ratio]
        self._rows_from: list[list[int]] = [[] for _ in range(self._n_nodes)]
        for e, node in enumerate(columns[before].tolist()):
            self._rows_from[node].append(e)
        self._order = self._sort()

    def _sort(self) -> list[int]:
        waiting = np.bincount(self._after, minlength=self._n_nodes).tolist()
        order = [node for node, count in enumerate(waiting) if count == 0]
        for node in order:  # grows while it is walked
            for e in self._rows_from[node]:
                waiting[self._after[e]] -= 1
                if waiting[self._after[e]] == 0:
                    order.append(self._after[e])
        return order

    def _lengths(self, ratios: Floats) -> list[float]:
        # Rows without a ratio have -1 in its place.
        lengths = self._least - self._saved * np.append(ratios, 0.0)[self._ratio]
        return list(lengths.tolist())

    def earliest(self, ratios: Floats, pause: float = 0.0) -> Floats:
        """Return the earliest start of every action, and the end of the batch as the last number.

        Args:
            ratios: Shape [R].
            pause: What every action waits in vain before it starts.
        """
        lengths = self._lengths(ratios)
        start = [pause] * self._n_nodes
        for node in self._order:
            ready = start[node] + pause
            for e in self._rows_from[node]:
                start[self._after[e]] = max(start[self._after[e]], ready + lengths[e])
        return np.array(start)

    def latest(self, ratios: Floats, end: float) -> Floats:
        """Return the latest start of every action with which the batch ends at ``end``."""
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

        In the order of execution, each action takes the time that it finds before the latest start
        of what follows it. Afterwards no ratio can fall alone.

        Args:
            ratios: Shape [R].
            may_fall: Which of them may change.
            whole: Whether they fall to 0 or not at all.
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
        """Raise dual values of rows, none below 0, until at every action as much leaves as arrives.

        They are a flow along the edges. Where no action keeps any of it, start times, which have no
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
