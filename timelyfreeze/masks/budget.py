"""Which tensors fill a freeze ratio: drawn at random, or a policy's choice trimmed to the ratio.

Notation: n tensors of a stage.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.masks.selection import (
    ParameterTable,
    build_parameter_table,
    check_ratio,
    draw_uniform,
    draw_whether,
    frozen_ratio,
)


def fit_to_ratio(
    table: ParameterTable, chosen: NDArray[np.bool_], ratio: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Bring a policy's choice to a freeze ratio: Algorithm 2 of arXiv:2602.05754, App. C.2.

    If the choice has just the ratio's part of the elements, it stands. If it has less, live tensors
    are frozen besides, drawn uniformly; if more, frozen ones are drawn to stay live. The paper
    counts single elements and rounds down; here whole tensors are drawn, each of those in question
    with the same probability, such that the expected number of frozen elements is the ratio's
    exactly and a draw stays near it (see :func:`timelyfreeze.masks.selection.draw_uniform`).

    Args:
        table: The n tensors of the stage.
        chosen: What the policy would freeze, bool, shape [n]. What is returned contains it, or is
            part of it.
        ratio: Actual freeze ratio, in [0, 1].
        rng: Generator, from ``mask_rng``.

    Raises:
        ValueError: If ``ratio`` is not in [0, 1] or the shape is not [n].
    """
    check_ratio(ratio)
    fraction = frozen_ratio(table, chosen)
    if not chosen.any():
        return draw_uniform(table, ratio, rng)
    mask = chosen.copy()
    if fraction < ratio:
        mask[~chosen] = _draw(table, ~chosen, (ratio - fraction) / (1.0 - fraction), rng)
    elif fraction > ratio:
        mask[chosen] = _draw(table, chosen, ratio / fraction, rng)
    return mask


def fit_whole_stage(
    table: ParameterTable, front: NDArray[np.bool_], ratio: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Freeze all of a first stage, the front that a policy chose, or nothing.

    The backward of a first stage ends at its lowest live tensor, so it becomes shorter by a front
    that is frozen, and not by tensors here and there. A draw between the front and all, or between
    the front and nothing, freezes the ratio's part of the elements in the mean.

    ``front`` is what the policy would freeze of the stage, from its input on, bool, shape [n];
    without any the stage is frozen all or nothing. Arguments and errors as for ``fit_to_ratio``.
    """
    check_ratio(ratio)
    fraction = frozen_ratio(table, front)
    if fraction >= ratio:
        is_taken = fraction > 0.0 and draw_whether(ratio / fraction, rng)
        return front & is_taken
    return front | draw_whether((ratio - fraction) / (1.0 - fraction), rng)


def _draw(
    table: ParameterTable, among: NDArray[np.bool_], ratio: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw ``ratio`` of the elements of the tensors ``among``; shape [among.sum()]."""
    part = build_parameter_table(
        (table.names[i], int(table.sizes[i])) for i in np.flatnonzero(among).tolist()
    )
    return draw_uniform(part, ratio, rng)
