"""Constant freezing: the first k layers (SmartPipe, Sec. V, and AutoFreeze), or named tensors."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.files import listed
from timelyfreeze.policies.layout import ModelLayout
from timelyfreeze.policies.policy import Check, Decision, FreezePolicy, register_policy
from timelyfreeze.settings import AtLeast0, key

_RANGE = re.compile(r"(?<![^.])(\d+)-(\d+)(?![^.])")


@register_policy("fixed", whole_layers=True)
@dataclass(frozen=True)
class Fixed(FreezePolicy):
    """Freeze the first layers, the embedding with them, or named tensors, after warm-up."""

    layers: AtLeast0 | None = None
    """How many transformer blocks from the front are frozen; unset: 1, or none besides names."""

    names: list[str] = field(default_factory=list)
    """Patterns of what is frozen, by names of tensors or of modules that hold them, such as
    ["embed", "layers.0-7", "*.norm"]. "embed" is whatever lies before the first block, 0-7 stands
    for blocks 0 to 7, * for any characters."""

    check_interval = sys.maxsize  # never: there is nothing to decide again

    def start(self, check: Check) -> Decision:
        """Freeze the prefix and the named tensors."""
        layout = check.layout
        n_layers = int(not self.names) if self.layers is None else self.layers
        layout.require_layers("fixed.layers", n_layers)
        frozen = layout.prefix(n_layers)
        for pattern in self.names:
            frozen = frozen | _named(pattern, layout)
        live = layout.layers[~frozen]
        n_frozen = max(0, int(live.min())) if live.size else layout.n_layers
        return Decision(frozen, metrics={"frozen_layers": min(n_frozen, layout.n_layers)})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Keep the decision."""
        return before


def _named(pattern: str, layout: ModelLayout) -> NDArray[np.bool_]:
    """Mark the tensors named by a pattern; ValueError for none."""
    numbers = {int(word) for name in layout.names for word in name.split(".") if word.isdecimal()}
    globs = set(_without_ranges(pattern, sorted(numbers)))
    # So that *.norm finds the norm that lies in no block too.
    globs |= {glob.removeprefix("*.") for glob in globs}
    found = [
        any(fnmatchcase(n, g) or fnmatchcase(n, f"{g}.*") for g in globs) for n in layout.names
    ]
    mask = np.array(found) | ((pattern == "embed") & (layout.layers < 0))
    if not mask.any():
        parts = [name.split(".") for name in layout.names]
        paths = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
        near = get_close_matches(_RANGE.sub(r"\1", pattern), paths, n=3, cutoff=0.0)
        raise ValueError(
            f"{key('fixed.names')} has {pattern!r}; it must match a tensor or module of the "
            f"model; the nearest names are {listed(near)}"
        )
    return mask


def _without_ranges(pattern: str, numbers: Sequence[int]) -> Iterator[str]:
    """Yield a pattern once per number of the model within its ranges."""
    if (found := _RANGE.search(pattern)) is None:
        yield pattern
        return
    low, high = map(int, found.groups())
    for number in (n for n in numbers if low <= n <= high):
        head, tail = pattern[: found.start()], pattern[found.end() :]
        yield from _without_ranges(f"{head}{number}{tail}", numbers)
