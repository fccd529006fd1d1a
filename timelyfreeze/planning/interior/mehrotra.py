"""An interior-point method for programs whose rows form a strip: minimise c'x over G x >= h.

Mehrotra's predictor-corrector method (1992), from a point strictly inside. Bounds of columns are
rows like others. ``y`` are the dual overheads of the rows: at an optimum G'y = c, y >= 0, and h'y is
the same as c'x.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior.newton import NewtonMatrix
from timelyfreeze.planning.interior.rows import Rows
from timelyfreeze.planning.interior.strip import StripError

Floats = NDArray[np.float64]

_MOST_STEPS = 200
# How much of the way to the boundary a step may go.
_SHARE = 0.9
# How much longer a step should become by a correction, and how many are tried.
_LONGER = 0.3
_MOST_CORRECTIONS = 2
# Steps in a row that come no nearer: rounding has the upper hand.
_MOST_STALLED = 10
# Accuracy of the Newton systems: to look ahead, and to go.
_ROUGHLY, _FULLY = 1e-3, 1e-7


@dataclass(frozen=True, eq=False)
class InteriorSolution:
    """Where the method stopped.

    Attributes:
        x: Shape [n], strictly inside.
        overheads: y, shape [rows], positive.
        gap: c'x - h'y, relative to c'x if that is above 1: how far x may be from the optimum.
        residual: Largest error of G'y = c.
        n_steps: Steps taken.
    """

    x: Floats
    overheads: Floats
    gap: float
    residual: float
    n_steps: int

    @property
    def miss(self) -> float:
        """The larger of what is missing to an optimum."""
        return max(abs(self.gap), self.residual)


def solve_interior(
    rows: Rows,
    least: Floats,
    cost: Floats,
    *,
    start: Floats,
    eliminate: NDArray[np.bool_],
    tolerance: float = 1e-8,
    deadline: float = np.inf,
) -> InteriorSolution:
    """Minimise c'x over G x >= h.

    Args:
        rows: G, with a row for each column alone (a bound).
        least: h, shape [rows].
        cost: c, shape [n].
        start: Shape [n], with G x > h.
        eliminate: As for ``NewtonMatrix``.
        tolerance: Stop when ``gap`` and ``residual`` are below.
        deadline: Stop where ``time.monotonic`` has passed it.

    Returns:
        InteriorSolution: The best point on the way. Its gap and residual are above ``tolerance`` if
        time ran out, or rounding allowed no more.

    Raises:
        ValueError: If ``start`` is not strictly inside.
        StripError: If not even the first Newton system could be factored.
    """
    x = start.copy()
    slack = rows.times(x) - least
    if not (slack > 0.0).all():
        raise ValueError(f"the start breaks a row by {-slack.min()}, or only just keeps it")
    newton = NewtonMatrix(rows, eliminate)
    overheads = _first_overheads(rows, newton, slack, x, cost)
    best: InteriorSolution | None = None
    for n_steps in range(_MOST_STEPS + 1):
        residuals = cost - rows.transposed_times(overheads)
        value = float(cost @ x)
        gap = (value - float(least @ overheads)) / max(abs(value), 1.0)
        now = InteriorSolution(x, overheads, gap, float(np.abs(residuals).max()), n_steps)
        if best is None or now.miss <= best.miss:
            best = now
        lost = n_steps > best.n_steps + _MOST_STALLED
        if best.miss <= tolerance or lost or time.monotonic() > deadline:
            break
        try:
            newton.factor(overheads / slack)
        except StripError:
            break
        move = _Move(rows, newton, slack, overheads, residuals)
        far, far_overheads = move.reach(_SHARE)
        x = x + far * move.x
        slack = slack + far * move.slack
        overheads = overheads + far_overheads * move.overheads
    assert best is not None
    return best


class _Move:
    """One step: straight for the optimum to see how far one gets, then with what that taught.

    Args:
        rows: G.
        newton: Factored for ``overheads / slack``.
        slack: G x - h.
        overheads: y.
        residuals: c - G'y.
    """

    def __init__(
        self, rows: Rows, newton: NewtonMatrix, slack: Floats, overheads: Floats, residuals: Floats
    ) -> None:
        self._rows, self._newton = rows, newton
        self._slack, self._overheads = slack, overheads
        mean = float(slack @ overheads) / len(slack)
        self._solve(-slack * overheads, residuals, _ROUGHLY)
        far, far_overheads = self.reach()
        ahead = float((slack + far * self.slack) @ (overheads + far_overheads * self.overheads))
        self._centre = (ahead / len(slack) / mean) ** 3 * mean
        wanted = self._centre - slack * overheads - self.slack * self.overheads
        self._solve(wanted, residuals, _FULLY)
        for _ in range(_MOST_CORRECTIONS):
            if not self._correct():
                break

    def _solve(self, wanted: Floats, residuals: Floats | float, accuracy: float) -> None:
        """Solve z dy + y dz = wanted, G'dy = residuals, dz = G dx."""
        right = self._rows.transposed_times(wanted / self._slack) - residuals
        self.x = self._newton.solve(right, accuracy)
        self.slack = self._rows.times(self.x)
        self.overheads = (wanted - self._overheads * self.slack) / self._slack

    def reach(self, fraction: float = 1.0) -> tuple[float, float]:
        """Return how much of the move, at most all, takes ``share`` of the way to the boundary.

        Returns:
            For x, and for the overheads.
        """
        return _reach(self._slack, self.slack, fraction), _reach(
            self._overheads, self.overheads, fraction
        )

    def _correct(self) -> bool:
        """Pull back the products that a longer step would throw off (Gondzio, 1996).

        Returns:
            Whether that makes the step longer; if not, the move is left as it was.
        """
        before = self.x, self.slack, self.overheads
        far, far_overheads = self.reach()
        if min(far, far_overheads) > 0.9:
            return False
        longer, longer_overheads = min(1.0, far + _LONGER), min(1.0, far_overheads + _LONGER)
        ahead = (self._slack + longer * self.slack) * (
            self._overheads + longer_overheads * self.overheads
        )
        low, high = 0.1 * self._centre, 10.0 * self._centre
        pull = np.maximum(np.clip(ahead, low, high) - ahead, -high)
        self._solve(pull, 0.0, _FULLY)
        self.x, self.slack, self.overheads = (
            old + new for old, new in zip(before, (self.x, self.slack, self.overheads), strict=True)
        )
        now, now_overheads = self.reach()
        if now + now_overheads < far + far_overheads + 0.1 * _LONGER:
            self.x, self.slack, self.overheads = before
            return False
        return True


def _first_overheads(
    rows: Rows, newton: NewtonMatrix, slack: Floats, x: Floats, cost: Floats
) -> Floats:
    """Return positive overheads close to G'y = c and to equal products with the slacks."""
    middle = max(abs(float(cost @ x)), 1.0) / len(slack)
    newton.factor(middle / slack**2)
    step = newton.solve(rows.transposed_times(middle / slack) - cost, _FULLY)
    overheads = middle / slack - middle / slack**2 * rows.times(step)
    return np.maximum(overheads, 0.1 * middle / slack)


def _reach(values: Floats, step: Floats, fraction: float) -> float:
    """Return how much of ``step``, at most all, takes a value ``share`` of the way to 0."""
    falling = step < 0.0
    return min(1.0, fraction * float(np.min(-values[falling] / step[falling], initial=np.inf)))
