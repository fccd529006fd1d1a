"""Selection: the parameter tensors of a stage frozen in a microbatch.

The uniform random selection of arXiv:2602.05754, Sec. 3.3: under an actual freeze ratio every
tensor is frozen with this probability. A draw here also keeps the frozen fraction of elements near
the ratio, because the fraction shortens the backward. Notation: n tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


def mask_rng(
    seed: int, step: int, batch_index: int, microbatch: int, stage: int
) -> np.random.Generator:
    """Generator for the mask of a backward; a pure function of its arguments.

    Every data-parallel replica, and a run resumed from a checkpoint, therefore draws the same masks
    without exchanging or storing any state. Philox is a counter-based generator: the arguments fill
    its key and the upper words of its counter, so two backwards never share a stream, and mixed
    seeds cannot collide. Several batches in a step come from gradient accumulation.
    """
    key = np.array([seed, step], dtype=np.uint64)
    # The lowest counter word advances with every draw; the others stay what they are set to.
    counter = np.array([0, batch_index, microbatch, stage], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """Parameter tensors of a stage; masks follow the order of ``names``."""

    names: tuple[str, ...]  # the n parameter names, each once
    sizes: NDArray[np.int64]  # number of elements of each, int64, shape [n], at least 1

    @cached_property
    def total(self) -> int:
        """Number of elements of all tensors together."""
        return int(self.sizes.sum())

    @cached_property
    def classes(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """Tensors by size, largest first, and within a size by role.

        A role is a name without its numbers: ``layers.3.attention.wq.weight`` and
        ``layers.4.attention.wq.weight`` share a role. An entry is the size in elements and a tuple
        of tensor indices per role.
        """
        grouped: dict[int, dict[str, list[int]]] = {}
        for i, (name, size) in enumerate(zip(self.names, self.sizes.tolist(), strict=True)):
            role = ".".join(part for part in name.split(".") if not part.isdigit())
            grouped.setdefault(size, {}).setdefault(role, []).append(i)
        return tuple(
            (size, tuple(tuple(grouped[size][role]) for role in sorted(grouped[size])))
            for size in sorted(grouped, reverse=True)
        )

    @cached_property
    def group(self) -> tuple[int, ...]:
        """Rank of each tensor's (size, role) in the order of ``classes``, shape [n]."""
        groups = [members for _, roles in self.classes for members in roles]
        rank = {i: g for g, members in enumerate(groups) for i in members}
        return tuple(rank[i] for i in range(len(self.names)))


def build_parameter_table(named_sizes: Iterable[tuple[str, int]]) -> ParameterTable:
    """Collect a stage's freezable tensors. Sizes are those of whole tensors, not of shards."""
    pairs = list(named_sizes)
    seen: set[str] = set()
    for name, size in pairs:
        if name in seen:
            raise ValueError(f"parameter {name!r} is listed twice; names must be unique")
        if size < 1:
            raise ValueError(f"parameter {name!r} has {size} elements; it needs at least 1")
        seen.add(name)
    sizes = np.array([size for _, size in pairs], dtype=np.int64)
    sizes.setflags(write=False)
    return ParameterTable(names=tuple(name for name, _ in pairs), sizes=sizes)


def draw_uniform(
    table: ParameterTable, ratio: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw frozen tensors: with probability ``ratio`` each, and about the ratio in all.

    Pivotal sampling, balanced on the number of elements. Tensors start with the probability
    ``ratio`` and meet in pairs; probability moves from one to the other until one of the two is
    decided, in an order (largest first, one role after the other, shuffled within a role) with at
    most one undecided tensor per size. The undecided tensor then meets all smaller tensors at once:
    rounded, with its lost or gained elements taken up evenly by them. With too few smaller tensors
    the rounding stands alone.

    Why probabilities are exactly ``ratio``: every move goes in one of two opposite directions, with
    odds for a mean of zero, so a tensor's probability is a bounded martingale from ``ratio`` to 1
    (frozen) or 0, hence ends at 1 with probability ``ratio``.

    Why the fraction is kept: a move preserves the expected number of frozen elements of its
    participants; only a tensor rounded alone changes it. The frozen fraction thus differs from
    ``ratio`` by less than the fraction of a tensor of each size, and as a rule, when the smaller
    tensors can absorb the rounding, by less than the smallest tensor's.

    The mask has the shape [n]. Ratios of 0 and 1 are exact and use no random numbers; others use a
    generator from ``mask_rng``.
    """
    n = len(table.names)
    if ratio in (0.0, 1.0):
        return np.full(n, ratio == 1.0)
    # n shuffle keys; then a meeting or a rounding takes one die, and a tensor causes at most one
    # of each: it meets when it joins, and is rounded when its size is through.
    dice = rng.random(3 * n).tolist()
    # Integer part: the group, so groups stay in order. Fraction: the shuffle within the group.
    keys = [group + die for group, die in zip(table.group, dice[:n], strict=True)]
    order = sorted(range(n), key=keys.__getitem__)
    frozen = [False] * n
    die = iter(dice[n:])
    base = ratio  # the probability of every tensor not yet met; they stay alike throughout
    rest = table.total
    position = 0
    for size, roles in table.classes:
        count = sum(map(len, roles))
        members = order[position : position + count]
        position += count
        rest -= size * count
        carried, chance = _settle_equals(members, base, die, frozen)
        if carried is None:
            continue
        frozen[carried] = next(die) < chance
        # Elements by which this rounding exceeds, or misses, what was expected. All smaller
        # tensors together make up for it, but only if they could have done so both ways:
        # otherwise the mean of their move would not be zero.
        excess, deficit = (1.0 - chance) * size, chance * size
        if excess > base * rest or deficit > (1.0 - base) * rest:
            continue
        base += (-excess if frozen[carried] else deficit) / rest
        if not 0.0 < base < 1.0:
            # The bound was met to the last bit, so what is left is decided as well.
            for i in order[position:]:
                frozen[i] = base >= 0.5
            break
    return np.array(frozen, dtype=np.bool_)


def _settle_equals(
    members: list[int], base: float, die: Iterator[float], frozen: list[bool]
) -> tuple[int | None, float]:
    """Let tensors of a size and probability ``base`` meet until one is undecided.

    Members join in their order; ``frozen`` receives the decisions. Returns the undecided tensor and
    its probability, or None if all are decided.
    """
    carried: int | None = None
    chance = 0.0
    for newcomer in members:
        if carried is None:
            carried, chance = newcomer, base
            continue
        joint = chance + base
        if joint < 1.0:
            # One of the two is decided to stay live; the other goes on with all the probability.
            if next(die) * joint >= chance:
                carried = newcomer
            chance = joint
        else:
            # One of the two is frozen; the other goes on with what is left.
            if next(die) * (2.0 - joint) < 1.0 - base:
                frozen[carried] = True
                carried = newcomer
            else:
                frozen[newcomer] = True
            chance = joint - 1.0
            if chance == 0.0:
                carried = None
    return carried, chance


def draw_whether(ratio: float, rng: np.random.Generator) -> bool:
    """Return True with probability ``ratio``; 0 and 1 are exact and use no random numbers."""
    return ratio == 1.0 or (ratio > 0.0 and bool(rng.random() < ratio))


def frozen_ratio(table: ParameterTable, mask: NDArray[np.bool_]) -> float:
    """Frozen fraction of a stage's elements under a mask, shape [n]; 0 without elements."""
    return float(table.sizes[mask].sum()) / table.total if table.total else 0.0


@dataclass(frozen=True, eq=False)
class FreezeUnits:
    """The tensors of a stage, and the units frozen together."""

    tensors: ParameterTable  # the n tensors
    # the u units, each with the name of its first tensor, and in the order of those
    table: ParameterTable
    # number of the unit that each tensor belongs to, int64, shape [n]; u for those that are never
    # frozen
    of_tensor: NDArray[np.int64]

    def spread(self, units: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask over tensors, shape [n], of a mask over units, shape [u]."""
        return np.append(units, False)[self.of_tensor]

    def gather(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask over units, shape [u], of a mask over tensors, shape [n].

        Tensors never frozen do not count.
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

    Tensors of a block are frozen together, all others alone, ``exact`` ones never.
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


def fit_to_ratio(
    table: ParameterTable, chosen: NDArray[np.bool_], ratio: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Bring a policy's choice to a freeze ratio: Algorithm 2 of arXiv:2602.05754, App. C.2.

    A choice of the ratio's elements stands. With fewer, further live tensors are frozen, drawn
    uniformly; with more, frozen tensors are drawn to stay live. The paper counts single elements
    and rounds down; here whole tensors are drawn with equal probability, such that the expected
    number of frozen elements is the ratio's exactly and a draw stays near (see
    :func:`draw_uniform`). The result contains ``chosen``, bool, shape [n], or is part of it.
    """
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
    """Freeze all of a first stage, the front of a policy, or nothing.

    The backward of a first stage ends at its lowest live tensor, and so is shortened by a frozen
    front, and not by scattered tensors. A draw between the front and all, or between the front and
    nothing, freezes the ratio's part of the elements in the mean.

    ``front`` marks the policy's tensors of the stage, from its input on, bool, shape [n]; without
    any the stage is frozen all or nothing. Arguments as for ``fit_to_ratio``.
    """
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
