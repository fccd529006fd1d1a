"""Times of stages if the model were cut elsewhere.

The model: layers are alike, so a moved layer takes a constant overhead along. Embedding, head and
loss stay with the first and the last stage.

- As many stages as were measured: a stage takes its measured time, plus the overhead of received
    layers, minus the overhead of given layers.
- Another number of stages: first and last as above; all others take the fixed overhead of a stage
    and of its layers.
- The first stage has no input gradient to compute, so a layer's frozen time says nothing there:
  with everything frozen a layer takes the measured fraction of its unfrozen time.

The overhead of a layer is measured by the profile, which times stages of two sizes. In a training
run the overhead is the time of middle stages over their layers, and the fixed overhead is 0.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from timelyfreeze.whatif.grid import Split, layers_of_split, render_split
from timelyfreeze.whatif.times import StageTimes

# What a measurement may be off by, as a fraction of a stage's forward and backward.
_NOISE = 0.02


@dataclass(frozen=True)
class LayerModel:
    """Measured stages, and the overheads of layers moved between them."""

    stages: tuple[StageTimes, ...]  # times of the stages that were measured
    layers: Split  # how many layers each of them has
    layer: StageTimes  # overhead of a layer
    fixed: StageTimes  # overhead of a stage in the middle that has no layers

    @property
    def n_layers(self) -> int:
        """Number of layers of the whole model."""
        return sum(self.layers)

    def stage(self, index: int, n_stages: int, n_layers: int) -> StageTimes:
        """Return the times of stage ``index`` of ``n_stages`` with ``n_layers`` layers.

        Times may come out impossible, such as below 0 where a stage gives more layers than its
        measured time holds; ``StageTimes.errors`` tells. ``pinned`` lists backwards no faster
        frozen, taken as unfrozen.
        """
        return self._stage(index, n_stages, n_layers).pinned()

    def pinned(self, split: Sequence[int]) -> list[int]:
        """Return the stages of a split with a backward no faster frozen.

        Freezing shortens every backward, so noise dominates there.
        """
        stages = (self._stage(index, len(split), n) for index, n in enumerate(split))
        return [
            index
            for index, times in enumerate(stages)
            if times.frozen_backward_ms > times.backward_ms
            or max(times.frozen_weight_ms, 0.0) > times.weight_ms
        ]

    def _stage(self, index: int, n_stages: int, n_layers: int) -> StageTimes:
        is_first, is_last = index == 0, index == n_stages - 1
        if not (is_first or is_last or n_stages == len(self.stages)):
            return self.fixed.plus(self.layer, n_layers)
        measured = self.stages[-1 if is_last else index]
        moved = n_layers - self.layers[-1 if is_last else index]
        if not is_first:
            return measured.plus(self.layer, moved)
        overhead = replace(self.layer, input_ms=0.0, weight_ms=self.layer.backward_ms)
        return _frozen_as(measured, measured.plus(overhead, moved))

    def least_layers(self, n_stages: int) -> Split:
        """Return the smallest number of layers with possible times, by stage."""
        needed = []
        for index in range(n_stages):
            n = 0 if index in (0, n_stages - 1) else 1
            while n < self.n_layers and self.stage(index, n_stages, n).errors():
                n += 1
            needed.append(n)
        if sum(needed) > self.n_layers:
            raise ValueError(f"{self.n_layers} layers are too few for {n_stages} stages")
        return tuple(needed)

    def times(self, split: Sequence[int]) -> tuple[StageTimes, ...]:
        """Return the times of all stages of a split."""
        check_split(split, self.n_layers)
        stages = tuple(self.stage(index, len(split), n) for index, n in enumerate(split))
        check_possible(stages, f"the split {render_split(split)} is")
        return stages


def check_possible(stages: Sequence[StageTimes], what: str) -> None:
    """Refuse impossible times of extrapolated stages; ``what`` begins the message."""
    for index, times in enumerate(stages):
        if errors := times.errors():
            raise ValueError(
                f"{what} out of the measurements' reach: stage {index}: {'; '.join(errors)}"
            )


def check_split(split: Sequence[int], n_layers: int) -> None:
    """Refuse an impossible split of ``n_layers`` layers."""
    name = f"the split {render_split(split)}"
    if sum(split) != n_layers:
        raise ValueError(f"{name} has {sum(split)} layers; the model has {n_layers}")
    if min(split) < 0 or min(split[1:-1], default=1) < 1:
        raise ValueError(
            f"{name} leaves a stage without layers; only the first and the last, which have "
            "embedding and head, can do without"
        )


def _frozen_as(measured: StageTimes, times: StageTimes) -> StageTimes:
    """Return times of a first stage, whose W does the whole backward, as frozen as measured."""
    left = fraction(measured.frozen_backward_ms, measured.backward_ms)
    left_of_w = fraction(measured.frozen_weight_ms, measured.weight_ms)
    return replace(
        times,
        frozen_backward_ms=left * times.backward_ms,
        frozen_weight_ms=left_of_w * times.weight_ms,
    )


def fraction(part_ms: float, whole_ms: float) -> float:
    """Return a time over another; 0 where there is nothing."""
    return part_ms / whole_ms if whole_ms > 0.0 else 0.0


def layer_model(
    stages: Sequence[StageTimes],
    layers: Sequence[int],
    layer: StageTimes | None = None,
    fixed: StageTimes | None = None,
) -> LayerModel:
    """Find the overheads of moved layers; a layer's is the middle's if not given."""
    if layer is None:
        n_middle = sum(layers[1:-1])
        if n_middle == 0:
            raise ValueError(
                f"{len(stages)} stages with {render_split(layers)} layers do not tell what a layer "
                "takes: each has an end of the model in it"
            )
        layer = functools.reduce(StageTimes.plus, stages[1:-1]).over(n_middle)
    return LayerModel(tuple(stages), tuple(layers), layer, fixed or StageTimes())


def layer_overheads(
    one: StageTimes, many: StageTimes, n_layers: int
) -> tuple[StageTimes, StageTimes]:
    """Find the overhead of a layer, and of a stage without layers, from stages of two sizes.

    ``one`` has a single layer and ``many`` has ``n_layers``, 2 or more; both are stages in the
    middle. The overheads give ``many`` exactly. Where layers cost nothing, as frozen weight
    gradients, noise can make the larger stage faster; the overhead is then 0.
    """
    slack_ms = _NOISE * (many.forward_ms + many.backward_ms)
    overheads: dict[str, float] = {}
    for field in fields(StageTimes):
        one_ms, many_ms = getattr(one, field.name), getattr(many, field.name)
        if many_ms < one_ms - slack_ms:
            raise ValueError(
                f"{field.name} is {many_ms:.4g} with {n_layers} layers and {one_ms:.4g} with 1; "
                "measure again on a quiet machine, with more --repeats"
            )
        overheads[field.name] = max(many_ms - one_ms, 0.0) / (n_layers - 1)
    layer = StageTimes(**overheads)
    if errors := layer.errors():
        raise ValueError(
            f"the overhead of a layer comes out impossible: {'; '.join(errors)}; measure again on "
            "a quiet machine, with more --repeats"
        )
    return layer, many.plus(layer, -n_layers)


_NOTHING = StageTimes()


@dataclass(frozen=True)
class BlockTimes:
    """Times of unlike layers."""

    stages: tuple[StageTimes, ...]  # times of the stages that were measured
    layers: Split  # how many layers each of them has
    blocks: tuple[StageTimes, ...]  # what each layer takes in a stage that is not the first

    @property
    def n_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.blocks)

    def stage(self, index: int, n_stages: int, start: int, stop: int) -> StageTimes:
        """Return the times of stage ``index`` with layers ``start`` to ``stop`` - 1."""
        times = functools.reduce(StageTimes.plus, self.blocks[start:stop], _NOTHING)
        if index == n_stages - 1 and self.layers[-1] == 0:
            times = times.plus(self.stages[-1])
        if index > 0:
            return times
        if self.layers[0] == 0:
            times = times.plus(self.stages[0])
        times = replace(times, input_ms=0.0, weight_ms=times.backward_ms)
        return _frozen_as(self.stages[0], times)

    def times(self, split: Sequence[int]) -> tuple[StageTimes, ...]:
        """Return the times of all stages of a split; errors as ``check_split``."""
        check_split(split, self.n_layers)
        if tuple(split) == self.layers:
            return self.stages
        return tuple(
            self.stage(index, len(split), layers.start, layers.stop)
            for index, layers in enumerate(layers_of_split(split))
        )


def block_times(stages: Sequence[StageTimes], layers: Sequence[int]) -> BlockTimes:
    """Share out times of stages among their layers."""
    shares = [stage.over(n) if n else _NOTHING for stage, n in zip(stages, layers, strict=True)]
    shares[0] = _as_behind(shares[0], stages[1])
    blocks = [share for share, n in zip(shares, layers, strict=True) for _ in range(n)]
    return BlockTimes(tuple(stages), tuple(layers), tuple(blocks))


def _as_behind(first: StageTimes, second: StageTimes) -> StageTimes:
    """Return a layer of the first stage as if behind another."""
    unfrozen_ms = first.backward_ms
    split_ms = second.input_ms + second.weight_ms
    return replace(
        first,
        frozen_backward_ms=unfrozen_ms * fraction(second.frozen_backward_ms, second.backward_ms),
        input_ms=unfrozen_ms * fraction(second.input_ms, split_ms),
        weight_ms=unfrozen_ms * fraction(second.weight_ms, split_ms),
        frozen_weight_ms=unfrozen_ms * fraction(second.frozen_weight_ms, split_ms),
    )
