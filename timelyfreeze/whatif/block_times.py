"""What stages would take if a model were cut elsewhere whose layers differ.

As for a ConvNeXt, whose later blocks are larger and have smaller pictures. A layer takes its share
of the stage that it was measured in, wherever it goes: the stage's time over its layers. So the
fewer layers a measured stage has, the closer; exact are the split that was measured and every move
of whole stages. The embedding moves with the first stage's layers, head and loss with the last's.

The first stage has no input gradient to compute. Its layers take as large a part of their backward
for it elsewhere as those of the second stage, and a first stage saves by freezing what the measured
one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import check_split, fraction
from timelyfreeze.whatif.partition import fewest_layers
from timelyfreeze.whatif.times import StageTimes

_NOTHING = StageTimes()


@dataclass(frozen=True)
class BlockTimes:
    """Times of layers that differ.

    Made by ``block_times``.

    Attributes:
        stages: Times of the stages that were measured.
        layers: How many layers each of them has.
        blocks: What each layer takes in a stage that is not the first.
    """

    stages: tuple[StageTimes, ...]
    layers: Split
    blocks: tuple[StageTimes, ...]

    @property
    def n_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.blocks)

    def stage(self, index: int, n_stages: int, start: int, stop: int) -> StageTimes:
        """Return what stage ``index`` of ``n_stages`` would take with ``start`` to ``stop`` - 1."""
        times = _NOTHING
        for block in self.blocks[start:stop]:
            times = times.plus(block)
        if index == n_stages - 1 and self.layers[-1] == 0:
            times = times.plus(self.stages[-1])
        return self._first(times) if index == 0 else times

    def _first(self, times: StageTimes) -> StageTimes:
        """Return a first stage; its W does the whole backward."""
        measured = self.stages[0]
        if self.layers[0] == 0:
            times = times.plus(measured)
        left = fraction(measured.frozen_backward_ms, measured.backward_ms)
        left_of_w = fraction(measured.frozen_weight_ms, measured.weight_ms)
        return StageTimes(
            times.forward_ms,
            times.backward_ms,
            left * times.backward_ms,
            0.0,
            times.backward_ms,
            left_of_w * times.backward_ms,
        )

    def least_layers(self, n_stages: int) -> Split:
        """Return the smallest number of layers of each stage.

        Raises:
            ValueError: If these are more layers than the model has.
        """
        least = fewest_layers(n_stages)
        if sum(least) > self.n_layers:
            raise ValueError(f"{self.n_layers} layers are too few for {n_stages} stages")
        return least

    def pinned(self, split: Sequence[int]) -> list[int]:
        """Return no stage: a sum of measured times is no faster unfrozen than they are."""
        return []

    def times(self, split: Sequence[int]) -> tuple[StageTimes, ...]:
        """Return what each stage of a split would take; errors as ``check_split``."""
        check_split(split, self.n_layers)
        if tuple(split) == self.layers:
            return self.stages
        ends = [sum(split[: stage + 1]) for stage in range(len(split))]
        return tuple(
            self.stage(index, len(split), end - n, end)
            for index, (n, end) in enumerate(zip(split, ends, strict=True))
        )


def block_times(stages: Sequence[StageTimes], layers: Sequence[int]) -> BlockTimes:
    """Share out what stages take among their layers.

    Args:
        stages: Measured times of the stages.
        layers: How many layers each has.
    """
    shares = [stage.over(n) if n else _NOTHING for stage, n in zip(stages, layers, strict=True)]
    shares[0] = _as_behind(shares[0], stages[1])
    blocks = [share for share, n in zip(shares, layers, strict=True) for _ in range(n)]
    return BlockTimes(tuple(stages), tuple(layers), tuple(blocks))


def _as_behind(first: StageTimes, second: StageTimes) -> StageTimes:
    """Return a layer of the first stage as if another stood before it."""
    unfrozen_ms = first.backward_ms
    split_ms = second.input_ms + second.weight_ms
    return replace(
        first,
        frozen_backward_ms=unfrozen_ms * fraction(second.frozen_backward_ms, second.backward_ms),
        input_ms=unfrozen_ms * fraction(second.input_ms, split_ms),
        weight_ms=unfrozen_ms * fraction(second.weight_ms, split_ms),
        frozen_weight_ms=unfrozen_ms * fraction(second.frozen_weight_ms, split_ms),
    )
