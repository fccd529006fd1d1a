"""How a model is cut: the number of layers of each stage."""

from __future__ import annotations

from collections.abc import Sequence

Split = tuple[int, ...]


def render_split(split: Sequence[int]) -> str:
    """Return a split as text, such as "9,8,8,7"."""
    return ",".join(map(str, split))


def default_split(n_layers: int, n_stages: int) -> Split:
    """Return how TorchTitan cuts a model by default.

    Embedding and head count as a layer each; what does not divide goes to the stages in front.

    Raises:
        ValueError: If there are more stages than that makes units.
    """
    n_units = n_layers + 2
    if not 2 <= n_stages <= n_units:
        raise ValueError(f"{n_layers} layers cannot be cut into {n_stages} stages")
    units = [n_units // n_stages + (stage < n_units % n_stages) for stage in range(n_stages)]
    units[0] -= 1
    units[-1] -= 1
    return tuple(units)
