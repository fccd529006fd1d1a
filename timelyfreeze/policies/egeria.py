"""Egeria: freeze front blocks with a stable distance of outputs from an older copy.

Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing" (KGT), 2023.
Every n steps the frontmost live module l is compared with its *reference*, an 8-bit copy of a
snapshot (``timelyfreeze.policies.plasticity``). Where the plasticity has stood still for S
evaluations, l is frozen and l + 1 is watched (Algorithm 1). All modules are live again once the
learning rate has fallen to a tenth of its value at the freezing of module 0, and at steps named by
the user, as Sec. 4 asks for rising learning rates. Where the paper leaves a choice:

- A slope counts by its absolute value, and T is a fraction of the range of the module's plasticity.
- l is frozen when the counter reaches S, and the next module has a history of its own. The last
  module is never frozen.
- Bootstrapping ends at the first check whose loss, a mean over the interval, differs by less than a
    tenth from the check before.
- Blocks in front of l are frozen, hence equal in both models. So the reference is a copy of l
  alone, with l's input in training. The embedding freezes with module 0 and is not compared.
- Halving stops at S = 1 and W = 2, below which there is no line to fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any

from timelyfreeze.files import OneOf, Within, read_dataclass, to_plain
from timelyfreeze.policies.layout import ModelLayout
from timelyfreeze.policies.plasticity import History
from timelyfreeze.policies.policy import (
    BACKGROUND,
    FLOAT32,
    INLINE,
    INT8,
    Check,
    Compared,
    Decision,
    Evaluation,
    FreezePolicy,
    Observed,
    ReferenceSettings,
    register_policy,
)
from timelyfreeze.settings import AtLeast0, AtLeast1, key

NORM = "norm"
SQUARE = "square"
_MODULES = "egeria.modules"


@register_policy("egeria", whole_layers=True)
@dataclass(frozen=True)
class Egeria(FreezePolicy):
    """Freeze front modules, the embedding with the first, once their plasticity stands still.

    The paper gives no values for n, W and T and calls W = 5 too small; n, W and T are ours.
    """

    check_interval: AtLeast1 = 50
    """n: steps from one evaluation of the frontmost live module to the next, and from one look at
    the training loss to the next."""

    window: Annotated[int, Within(2)] = 10
    """W, at least 2: evaluations that plasticity is averaged over and a line is fitted to. After as
    many there is a new snapshot for the reference."""

    stale: AtLeast1 = 10
    """S, at least 1: evaluations in a row with a small slope after which a module is frozen. The
    paper sets S = W."""

    tolerance: Annotated[float, Within(0.0, above=True)] = 0.01
    """T, above 0: a slope is small if it is at most this fraction of the range of the module's
    plasticity so far, an evaluation."""

    bootstrap_change: Annotated[float, Within(0.0, above=True)] = 0.1
    """Nothing is frozen until the mean loss of n steps differs from that of the n before by less
    than this fraction of it; above 0."""

    unfreeze_at: Annotated[float, Within(0.0, 1.0, below=True)] = 0.1
    """Everything is live again, and W and S are halved, once the learning rate is at or below this
    fraction of what it was when the first module was frozen; in [0, 1), 0 for never."""

    unfreeze_steps: list[int] = field(default_factory=list)
    """Steps, each 1 or more, at whose next check everything is live again, and W and S are halved:
    where a cyclical schedule raises the learning rate."""

    modules: list[str] = field(default_factory=list)
    """Regular expressions, one for each module: a block belongs to the one that is found in a name
    of its parameters. Empty: neighbours on a stage are put together as long as a module has no more
    parameters than the largest block."""

    rows: Annotated[str, OneOf(NORM, SQUARE)] = NORM
    """What rows of similarities are divided by: their "norm", or its "square", as it is printed."""

    max_tokens: AtLeast0 = 256
    """Tokens of a microbatch that are compared; padding is left out where it is known. 0: whole
    examples are compared, as pictures always are."""

    reference: Annotated[str, OneOf(BACKGROUND, INLINE)] = BACKGROUND
    """Where the reference runs: "background", in a process of its own that training never waits
    for, or "inline", in the training process, so that a run can be repeated exactly."""

    precision: Annotated[str, OneOf(INT8, FLOAT32)] = INT8
    """What linear layers and dense convolutions of the reference compute in: "int8" or
    "float32"."""

    queue_length: AtLeast1 = 2
    """Evaluations that may wait for the process, at least 1. More are dropped and counted."""

    max_cpu_load: float = 0.5
    """Load of the machine (of the last minute, per core), above 0, over which evaluations are left
    out and counted. Only where a GPU trains; inf for no limit."""

    @property
    def reference_settings(self) -> ReferenceSettings:
        """How the reference is made and run."""
        return ReferenceSettings(
            self.reference,
            self.precision,
            self.max_tokens,
            self.rows == SQUARE,
            self.queue_length,
            self.max_cpu_load,
        )

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings."""
        yield from super().errors()
        if not self.max_cpu_load > 0.0:
            yield f"{key('egeria.max_cpu_load')} is {self.max_cpu_load}; it must be above 0"
        if any(step < 1 for step in self.unfreeze_steps):
            where = key("egeria.unfreeze_steps")
            yield f"{where} is {self.unfreeze_steps}; each step must be 1 or more"
        for pattern in self.modules:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{key(_MODULES)} has {pattern!r}, which is no regular expression: {error}"

    def start(self, check: Check) -> Decision:
        """Freeze nothing while bootstrapping."""
        if len(block_groups(check.layout, self.modules)) < 2:
            raise ValueError(
                f"{key(_MODULES)} is {self.modules}, which makes one module of the model; the last "
                "is never frozen, so there must be two or more"
            )
        return self._decision(EgeriaState(self.window, self.stale), check.layout)

    def decide(self, before: Decision, check: Check) -> Decision:
        """Apply comparisons in order, then decide on unfreezing."""
        assert check.observed is not None  # it compares outputs
        last, seen = read_dataclass(EgeriaState, before.memory), check.observed
        state = replace(last, dropped=last.dropped + seen.dropped, step=check.step)
        if not state.is_guided:
            ends, state = False, replace(state, loss=seen.loss)
            if seen.loss is not None and last.loss is not None:
                ends = abs(seen.loss - last.loss) < self.bootstrap_change * abs(last.loss)
            return self._decision(state.renewed(is_guided=True) if ends else state, check.layout)
        state, evaluations = self._evaluate(state, seen, block_groups(check.layout, self.modules))
        is_asked = any(last.step < step <= check.step for step in self.unfreeze_steps)
        has_fallen, rate = False, seen.learning_rate  # far below that of the first freeze
        if rate is not None and state.frozen_rate and self.unfreeze_at > 0.0:
            has_fallen = rate <= self.unfreeze_at * state.frozen_rate
        if state.front > 0 and (is_asked or has_fallen):
            window, stale = max(2, state.window // 2), max(1, state.stale // 2)
            state = state.renewed(
                front=0, frozen_rate=None, window=window, stale=stale, history=History()
            )
        return self._decision(state, check.layout, evaluations)

    def compared(self, decision: Decision, layout: ModelLayout) -> Compared | None:
        """Return the frontmost live module; None in bootstrapping, and for the last module."""
        state = read_dataclass(EgeriaState, decision.memory)
        groups = block_groups(layout, self.modules)
        if not state.is_guided or state.front == len(groups) - 1:
            return None
        return Compared(groups[state.front].start, groups[state.front].stop, state.copy)

    def _evaluate(
        self, state: EgeriaState, seen: Observed, groups: list[range]
    ) -> tuple[EgeriaState, tuple[Evaluation, ...]]:
        """Run Algorithm 1 for all comparisons of the frontmost live module of their time."""
        evaluations = []
        for found in seen.differences:
            if state.front == len(groups) - 1 or found.first != groups[state.front].start:
                continue  # begun before that module was frozen
            if not math.isfinite(found.value):
                state = replace(state, dropped=state.dropped + 1)
                continue
            history = state.history.after(found.value, state.window, self.tolerance)
            state = replace(state, history=history, copy_age=state.copy_age + 1)
            smoothed = history.smoothed[-1]
            evaluations.append(Evaluation(found.step, state.front, found.value, smoothed))
            if history.stale >= state.stale:
                rate = seen.learning_rate if state.front == 0 else state.frozen_rate
                state = state.renewed(front=state.front + 1, frozen_rate=rate, history=History())
            elif state.copy_age >= state.window:
                state = state.renewed()
        return state, tuple(evaluations)

    def _decision(
        self, state: EgeriaState, layout: ModelLayout, evaluations: tuple[Evaluation, ...] = ()
    ) -> Decision:
        groups = block_groups(layout, self.modules)
        n_frozen = groups[state.front].start
        metrics: dict[str, float] = {
            "frozen_layers": n_frozen,
            "frozen_modules": state.front,
            "bootstrapping": float(not state.is_guided),
            "dropped_evaluations": state.dropped,
            "stale_evaluations": state.history.stale,
        }
        if state.history.values:
            metrics |= {
                "plasticity": state.history.values[-1],
                "smoothed_plasticity": state.history.smoothed[-1],
                "plasticity_slope": state.history.slope,
            }
        return Decision(layout.prefix(n_frozen), to_plain(state), metrics, evaluations)


@dataclass(frozen=True)
class EgeriaState:
    """Where Algorithm 1 stands."""

    window: int  # W as it is now
    stale: int  # S as it is now
    step: int = 0  # optimizer step of the last check
    front: int = 0  # number of the frontmost live module, l
    is_guided: bool = False  # whether bootstrapping has ended
    loss: float | None = None  # mean loss of the interval before; None before there was one
    # learning rate when module 0 was frozen; None while it is live or unknown
    frozen_rate: float | None = None
    copy: int = 0  # number of the copy that l is compared with
    copy_age: int = 0  # evaluations with it
    dropped: int = 0  # comparisons that were left out so far
    history: History = field(default_factory=History)  # plasticity of l

    def renewed(self, **changes: Any) -> EgeriaState:
        """Return the state with a new copy, and whatever else changes."""
        return replace(self, copy=self.copy + 1, copy_age=0, **changes)


def block_groups(layout: ModelLayout, patterns: Sequence[str]) -> list[range]:
    """Divide the layers of a model into groups, from front to back.

    A block belongs to the group whose pattern is found in a name of its parameters. Without
    patterns neighbours of a stage are put together as long as a group has no more parameters than
    the largest block. ValueError if the patterns do not fit the model.
    """
    by_layer = dict(zip(layout.layers.tolist(), layout.stages.tolist(), strict=True))
    stages = [by_layer[layer] for layer in range(layout.n_layers)]
    if patterns:
        numbers = [_pattern_of(layout, layer, patterns) for layer in range(layout.n_layers)]
    else:
        numbers = _by_size(layout.layer_sums(layout.sizes).tolist(), stages)
    groups: dict[int, range] = {}
    places = list(zip(numbers, stages, strict=True))
    for (number, _), run in groupby(range(layout.n_layers), places.__getitem__):
        layers = list(run)
        if number in groups:
            raise ValueError(
                f"{key(_MODULES)}: {patterns[number]!r} takes blocks that are no neighbours on one "
                f"stage; block {layers[0]} comes after others"
            )
        groups[number] = range(layers[0], layers[-1] + 1)
    return list(groups.values())


def _by_size(sizes: Sequence[float], stages: Sequence[int]) -> list[int]:
    """Return each block's group, of blocks joined by size."""
    largest = max(sizes)
    numbers: list[int] = []
    filled = 0.0
    for layer, size in enumerate(sizes):
        is_new = layer == 0 or stages[layer] != stages[layer - 1] or filled + size > largest
        filled = size if is_new else filled + size
        numbers.append((numbers[-1] if numbers else -1) + is_new)
    return numbers


def _pattern_of(layout: ModelLayout, layer: int, patterns: Sequence[str]) -> int:
    names = [layout.names[i] for i in (layout.layers == layer).nonzero()[0]]
    found = [
        i for i, pattern in enumerate(patterns) if any(re.search(pattern, text) for text in names)
    ]
    if len(found) != 1:
        what = " and ".join(repr(patterns[i]) for i in found) or "none of its patterns"
        raise ValueError(
            f"{key(_MODULES)}: {what} are found in the names of block {layer} ({names[0]}); it "
            "must be exactly one"
        )
    return found[0]
