"""SmartPipe's formulas, Eq. 5 to 10, as printed: forward and backward take 1 each.

Notation: s stages on s devices, m microbatches of an iteration, I iterations, f frozen stages in
front. Which of them an exact play-through bears out is told in ``docs/plan.md``.
"""

from __future__ import annotations


def iteration_time(m: int, s: int) -> int:
    """Eq. 5: time of an iteration without freezing."""
    return 2 * (m + s - 1)


def bubble_fraction(m: int, s: int) -> float:
    """Eq. 6: fraction of it in which devices wait."""
    return 1.0 - m / (m + s - 1)


def gpipe_saved_time(f: int, iterations: int) -> int:
    """Eq. 7: what freezing saves of all iterations under GPipe."""
    return f * (2 * iterations - 1)


def one_f_one_b_saved_time(f: int, iterations: int) -> int:
    """Eq. 8: the same under 1F1B."""
    return f * iterations


def gpipe_bubbles(s: int, f: int, iterations: int) -> int:
    """Eq. 9: idle slots of live devices under GPipe."""
    return (s - f) * (iterations + 1) * (s - 2)


def one_f_one_b_bubbles(s: int, f: int, iterations: int) -> int:
    """Eq. 10: the same under 1F1B."""
    return (s - f) * iterations
