"""Groups of neighbouring transformer blocks that are frozen together.

Egeria freezes *modules*: blocks that belong together, with about as many parameters in one as in
the other. Here a group lies on one pipeline stage, because its input and output are compared there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.policies.layout import ModelLayout
from timelyfreeze.settings import key


@dataclass(frozen=True)
class BlockGroup:
    """Layers ``first`` to ``end`` - 1."""

    first: int
    end: int


def block_groups(layout: ModelLayout, patterns: Sequence[str], name: str) -> list[BlockGroup]:
    """Divide the blocks of a model into groups, from front to back.

    Args:
        layout: The model.
        patterns: Regular expressions, one for each group: a block belongs to the one that is found
            in a name of its parameters. None at all: neighbours of a stage are put together as long
            as a group has no more parameters than the largest block.
        name: Key of the patterns, for errors.

    Raises:
        ValueError: If a block belongs to no pattern or to several, blocks of a group are no
            neighbours, or a group lies on two stages.
    """
    stages = _stages(layout)
    if patterns:
        numbers = [_pattern_of(layout, layer, patterns, name) for layer in range(layout.n_layers)]
    else:
        numbers = _by_size(layout.layer_sums(layout.sizes).tolist(), stages)
    groups: list[BlockGroup] = []
    seen: list[int] = []
    for layer, number in enumerate(numbers):
        if not seen or number != seen[-1]:
            if number in seen:
                raise ValueError(
                    f"{key(name)}: {patterns[number]!r} takes blocks that are no neighbours; block "
                    f"{layer} comes after others"
                )
            seen.append(number)
            groups.append(BlockGroup(layer, layer + 1))
        else:
            groups[-1] = BlockGroup(groups[-1].first, layer + 1)
    for group, number in zip(groups, seen, strict=True):
        if patterns and stages[group.first] != stages[group.end - 1]:
            raise ValueError(
                f"{key(name)}: {patterns[number]!r} takes blocks of the stages "
                f"{stages[group.first]} and {stages[group.end - 1]}; all of a group must lie on one"
            )
    return groups


def _stages(layout: ModelLayout) -> list[int]:
    """Return the stage of each block."""
    pairs = zip(layout.layers.tolist(), layout.stages.tolist(), strict=True)
    by_layer = dict(pairs)
    return [by_layer[layer] for layer in range(layout.n_layers)]


def _by_size(sizes: Sequence[float], stages: Sequence[int]) -> list[int]:
    """Return the group of each block, of blocks that are put together by their sizes."""
    largest = max(sizes)
    numbers: list[int] = []
    filled = 0.0
    for layer, size in enumerate(sizes):
        is_new = layer == 0 or stages[layer] != stages[layer - 1] or filled + size > largest
        filled = size if is_new else filled + size
        numbers.append((numbers[-1] if numbers else -1) + is_new)
    return numbers


def _pattern_of(layout: ModelLayout, layer: int, patterns: Sequence[str], name: str) -> int:
    """Return which pattern a block belongs to."""
    names = [layout.names[i] for i in (layout.layers == layer).nonzero()[0]]
    found = [
        i for i, pattern in enumerate(patterns) if any(re.search(pattern, text) for text in names)
    ]
    if len(found) != 1:
        what = " and ".join(repr(patterns[i]) for i in found) or "none of its patterns"
        raise ValueError(
            f"{key(name)}: {what} are found in the names of block {layer} ({names[0]}); it must be "
            "exactly one"
        )
    return found[0]
