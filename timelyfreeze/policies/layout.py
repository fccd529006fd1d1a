"""Layers of the model, for the tensors of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.settings import key


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """Tensors of all stages, stage after stage, in the order of parameters."""

    names: tuple[str, ...]  # the n parameter names, each once
    sizes: NDArray[np.int64]  # number of elements of each, shape [n]
    stages: NDArray[np.int64]  # stage that holds each, shape [n]
    # layer of each, shape [n]: 0 to L - 1 for the transformer blocks from front to back, -1 for
    # what comes before them (the embedding), L for what comes after (the final norm and the head)
    layers: NDArray[np.int64]
    n_layers: int  # number of transformer blocks L

    def of_stage(self, stage: int) -> NDArray[np.int64]:
        """Positions of a stage's tensors, int64, in the order of its parameters."""
        return np.flatnonzero(self.stages == stage)

    def prefix(self, n_layers: int) -> NDArray[np.bool_]:
        """Mark the tensors of the first ``n_layers`` transformer blocks; bool, shape [n].

        The embedding goes with the first layer: while it is trained, the chain of input gradients
        has to run through everything behind it, and freezing the front would save little.
        """
        if not 0 <= n_layers <= self.n_layers:
            raise ValueError(
                f"a prefix of {n_layers} layers is asked for; the model has {self.n_layers}"
            )
        return (self.layers < n_layers) & (n_layers > 0)

    def require_layers(self, setting: str, n_layers: int) -> None:
        """Raise ValueError for a setting with more transformer blocks than there are."""
        if n_layers > self.n_layers:
            raise ValueError(f"{key(setting)} is {n_layers}; the model has {self.n_layers}")

    def layer_sums(self, values: ArrayLike) -> NDArray[np.float64]:
        """Add up numbers of tensors, shape [n], by transformer block, shape [L]."""
        in_blocks = (self.layers >= 0) & (self.layers < self.n_layers)
        sums = np.zeros(self.n_layers, dtype=np.float64)
        np.add.at(sums, self.layers[in_blocks], np.asarray(values, dtype=np.float64)[in_blocks])
        return sums


def build_layout(stages: Mapping[int, Sequence[tuple[str, int]]]) -> ModelLayout:
    """Join the stages of a pipeline.

    A tensor's layer is read from the first number in its name (``layers.7.attention.wq.weight``),
    as every model of the kind has it. Layers are counted in order, so their numbers need not start
    at 0.
    """
    tensors = [(stage, name, size) for stage in sorted(stages) for name, size in stages[stage]]
    names = [name for _, name, _ in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"parameter {twice!r} is in the model twice; policies need names that are "
            "unique over all stages, with the layer's number in the whole model: keep the blocks "
            "of a stage in nn.ModuleDict({'3': block, ...})"
        )
    numbers = [next((int(w) for w in name.split(".") if w.isdigit()), None) for name in names]
    order = list(dict.fromkeys(number for number in numbers if number is not None))
    if not order:
        raise ValueError(
            "no parameter name has a layer number (as in layers.0.attention.wq.weight), so layers "
            f"cannot be told apart; names begin with {names[:3]}; keep the blocks of a stage in "
            "nn.ModuleDict({'3': block, ...})"
        )
    index = {number: layer for layer, number in enumerate(order)}
    layers, outside = [], -1
    for number in numbers:
        if number is None:
            layers.append(outside)
        else:
            layers.append(index[number])
            outside = len(order)
    inner = [layer for layer in layers if 0 <= layer < len(order)]
    if inner != sorted(inner):
        raise ValueError(
            "the layers of the model are not in order from the first stage to the last; "
            "freezing from the front needs them so"
        )
    return ModelLayout(
        names=tuple(names),
        sizes=_read_only([size for _, _, size in tensors]),
        stages=_read_only([stage for stage, _, _ in tensors]),
        layers=_read_only(layers),
        n_layers=len(order),
    )


def _read_only(values: Sequence[int]) -> NDArray[np.int64]:
    array = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array
