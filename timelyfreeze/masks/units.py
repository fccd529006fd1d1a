"""Units: what of a stage is frozen together, single tensors or whole blocks.

A block that is compiled has one backward for all of its tensors, so they are frozen all or none.
Whatever draws or chooses does so over units, each as large as its tensors together; masks stay per
tensor. Notation: n tensors, u units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.masks.selection import ParameterTable, build_parameter_table


@dataclass(frozen=True, eq=False)
class FreezeUnits:
    """The tensors of a stage, and the units that they are frozen in.

    Attributes:
        tensors: The n tensors.
        table: The u units, each with the name of its first tensor, and in the order of those.
        of_tensor: Number of the unit that each tensor belongs to, int64, shape [n]; u for those
            that are never frozen.
    """

    tensors: ParameterTable
    table: ParameterTable
    of_tensor: NDArray[np.int64]

    def spread(self, units: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask over tensors, shape [n], of one over units, shape [u]."""
        return np.append(units, False)[self.of_tensor]

    def gather(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask over units, shape [u], of one over tensors, shape [n].

        What it says of tensors that are never frozen does not count.

        Raises:
            ValueError: If it freezes a part of a unit.
        """
        n_units = len(self.table.names)
        units = np.zeros(n_units + 1, dtype=np.bool_)
        units[self.of_tensor[mask]] = True
        units = units[:n_units]
        if (torn := (self.spread(units) != mask) & (self.of_tensor < n_units)).any():
            raise ValueError(
                f"{self.tensors.names[torn.argmax()]} is to stay live and other tensors of its "
                "block are not; the block is compiled, so all of it is frozen or none"
            )
        return units


def build_units(
    tensors: ParameterTable,
    blocks: Sequence[Sequence[int]] = (),
    exact: NDArray[np.bool_] | None = None,
) -> FreezeUnits:
    """Group the tensors of a stage.

    Args:
        tensors: The n tensors.
        blocks: Positions of tensors that are frozen together; every other tensor is alone.
        exact: Which tensors are never frozen, bool, shape [n]; None for none.

    Raises:
        ValueError: If a tensor is in two blocks.
    """
    block_of: dict[int, tuple[int, ...]] = {}
    for block in map(tuple, blocks):
        for i in block:
            if i in block_of:
                raise ValueError(
                    f"{tensors.names[i]} belongs to two compiled blocks, which would have to be "
                    "frozen together; set compile.enable = false"
                )
            block_of[i] = block
    n = len(tensors.names)
    frozen = range(n) if exact is None else np.flatnonzero(~exact).tolist()
    members = list(dict.fromkeys(block_of.get(i, (i,)) for i in frozen))
    of_tensor = np.full(n, len(members), dtype=np.int64)
    for unit, block in enumerate(members):
        of_tensor[list(block)] = unit
    of_tensor.setflags(write=False)
    table = build_parameter_table(
        (tensors.names[block[0]], int(tensors.sizes[list(block)].sum())) for block in members
    )
    return FreezeUnits(tensors, table, of_tensor)
