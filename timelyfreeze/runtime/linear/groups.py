"""Linear layers of a common input: computed together, frozen together, with a common subspace."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

# What checkpointing and compiling put into names.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


class LinearGroup:
    """Layers of a common input of width ``d_in``, with ``d_out`` columns of output in all.

    Directions of a subspace are of the shorter side, the input's for several layers. ``weights``
    are the optimizer's; under FSDP a layer computes with gathered weights.
    """

    def __init__(self, layers: Sequence[nn.Linear], names: Sequence[str]) -> None:
        self.layers, self.names = tuple(layers), tuple(names)
        self.weights: tuple[Tensor, ...] = tuple(layer.weight for layer in layers)
        widths = [layer.out_features for layer in layers]
        self.d_in, self.d_out = layers[0].in_features, sum(widths)
        ends = accumulate(widths)
        self.columns = tuple(slice(end - n, end) for end, n in zip(ends, widths, strict=True))
        self.of_inputs = len(layers) > 1 or self.d_in <= self.d_out

    @property
    def name(self) -> str:
        """The name of the first weight, for the group."""
        return self.names[0]

    @property
    def bias_names(self) -> list[str]:
        """The names of the existing biases."""
        pairs = zip(self.names, self.layers, strict=True)
        return [self.bias_of(name) for name, layer in pairs if layer.bias is not None]

    @staticmethod
    def bias_of(name: str) -> str:
        """Return the name of the bias beside a weight."""
        return f"{name.removesuffix('weight')}bias"

    @property
    def side(self) -> int:
        """The length of a direction."""
        side: int = self.d_in if self.of_inputs else self.d_out
        return side

    def columns_of(self, name: str) -> slice:
        """Return the columns of a weight's outputs among the group's."""
        return self.columns[self.names.index(name)]


def stage_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters of a stage by the names of a model without wrappers, all different."""
    return [(_WRAPPERS.sub("", name), p) for name, p in module.named_parameters()]


def linear_groups(module: nn.Module, layers: Sequence[nn.Linear]) -> list[LinearGroup]:
    """Return the groups of ``layers`` of a module, in the module's order.

    A module declares layers of a common input in ``linear_groups``: tuples of their attributes.
    Every other layer is a group by itself. Layers sharing a weight form a group.
    """
    names = {id(p): name for name, p in stage_parameters(module)}
    known = {id(layer) for layer in layers}
    joined: dict[int, list[nn.Linear]] = {}
    for together in declared_groups(module):
        if all(id(layer) in known for layer in together):
            joined[id(together[0])] = together
            known.difference_update(id(layer) for layer in together)
    groups: dict[str, LinearGroup] = {}
    for layer in layers:
        together = joined.get(id(layer), [layer] if id(layer) in known else [])
        if together and names[id(layer.weight)] not in groups:
            group = LinearGroup(together, [names[id(each.weight)] for each in together])
            groups[group.name] = group
    return list(groups.values())


def declared_groups(module: nn.Module) -> Iterator[list[Any]]:
    """Yield the layers of a common input, as declared by modules."""
    for part in module.modules():
        for attributes in getattr(part, "linear_groups", ()):
            yield [getattr(part, attribute) for attribute in attributes]
