"""Times of stages whose first layers are frozen for good."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from timelyfreeze.whatif.grid import Split, render_split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.times import StageTimes


def frozen_layers(split: Sequence[int], n_frozen: int) -> Split:
    """Return how many layers of each stage are frozen if the first ``n_frozen`` are."""
    before = [0, *itertools.accumulate(split)]
    return tuple(
        min(max(n_frozen - start, 0), n) for start, n in zip(before[:-1], split, strict=True)
    )


def stages_in_front(split: Sequence[int], n_frozen: int) -> int:
    """Return how many stages are frozen whole: those before the first live layer.

    A last stage is never one of them, for it has the head.
    """
    ends = list(itertools.accumulate(split[:-1]))
    return sum(end <= n_frozen for end in ends) if n_frozen else 0


def front_times(
    model: LayerModel, split: Sequence[int], n_frozen: int, *, cached: bool = False
) -> tuple[StageTimes, ...]:
    """Return what each stage of a split takes.

    Args:
        model: Measured stages, and what layers take.
        split: Layers of each stage; one stage is the whole model.
        n_frozen: How many layers are frozen, 1 or more.
        cached: Whether what the front puts out is known, so that its forward falls away too.

    Raises:
        ValueError: If no layer is live, or as ``LayerModel.times``.
    """
    if not 0 < n_frozen < model.n_layers:
        raise ValueError(
            f"{n_frozen} layers of {model.n_layers} would be frozen; it must be 1 or more, and "
            "leave one live"
        )
    whole = _whole_model(model) if len(split) == 1 else model.times(split)
    n_front = stages_in_front(split, n_frozen)
    times = []
    for stage, (there, n_layers, frozen) in enumerate(
        zip(whole, split, frozen_layers(split, n_frozen), strict=True)
    ):
        if stage < n_front:
            times.append(StageTimes(forward_ms=0.0 if cached else there.forward_ms))
        elif stage > n_front:
            times.append(there)
        else:
            live = _live_part(model, stage, len(split), n_layers - frozen)
            forward_ms = live.forward_ms if cached else there.forward_ms
            # As in a first stage: nobody waits for an input gradient, so W does all of it.
            times.append(StageTimes(forward_ms, live.backward_ms, weight_ms=live.backward_ms))
    for stage, found in enumerate(times):
        if errors := found.errors():
            raise ValueError(
                f"{n_frozen} frozen layers of the split {render_split(split)} are out of the "
                f"measurements' reach: stage {stage}: {'; '.join(errors)}"
            )
    return tuple(times)


def layer_times(model: LayerModel, n_frozen: int) -> list[float]:
    """Return what each layer takes of a microbatch, forward and backward, milliseconds.

    Embedding and head count with the first and the last layer, frozen layers with their forward.
    """
    layer, fixed = model.layer, model.fixed
    first, last = model.stage(0, 2, 0), model.stage(1, 2, 0)
    times = [layer.forward_ms] * n_frozen
    times += [layer.forward_ms + layer.backward_ms] * (model.n_layers - n_frozen)
    times[0] += max(first.forward_ms - fixed.forward_ms, 0.0)
    beyond = last.plus(fixed, -1.0)
    times[-1] += max(beyond.forward_ms + beyond.backward_ms, 0.0)
    return times


def _live_part(model: LayerModel, stage: int, n_stages: int, n_live: int) -> StageTimes:
    """Return what the live layers of the stage in which the front ends take."""
    if n_stages == 1:
        return model.stage(1, 2, n_live)
    there = model.stage(stage, n_stages, n_live)
    if stage > 0:
        return there
    # The embedding is frozen too. Where noise says that it takes less than nothing, it takes that.
    without = model.fixed.plus(model.layer, n_live)
    return StageTimes(
        min(there.forward_ms, without.forward_ms), min(there.backward_ms, without.backward_ms)
    )


def _whole_model(model: LayerModel) -> tuple[StageTimes]:
    """Return the times of all layers in one stage, which has both ends of the model."""
    first, last = model.stage(0, 2, model.n_layers), model.stage(1, 2, 0)
    return (first.plus(last).plus(model.fixed, -1.0),)
