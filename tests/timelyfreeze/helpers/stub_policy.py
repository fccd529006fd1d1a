"""A policy that decides as a test says, a meter whose numbers it knows, and a model for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from timelyfreeze.policies.layout import build_layout
from timelyfreeze.policies.policy import Check, Decision, Measurement, Metric, Source

STAGES = {
    0: [("tok_embeddings.weight", 80), ("layers.0.w1.weight", 30), ("layers.0.norm.weight", 10)],
    1: [("layers.1.w1.weight", 30), ("layers.1.norm.weight", 10)],
    2: [("layers.2.w1.weight", 30), ("layers.2.norm.weight", 10)],
    3: [("layers.3.w1.weight", 30), ("norm.weight", 5), ("output.weight", 85)],
}
LAYOUT = build_layout(STAGES)
N = len(LAYOUT.names)
WEIGHTS = {name: 1.0 + i for i, name in enumerate(LAYOUT.names)}
NOTHING, EVERYTHING = np.zeros(N, dtype=np.bool_), np.ones(N, dtype=np.bool_)

MEASUREMENT = Measurement(Source.UPDATES, (Metric.ABS_SUM, Metric.SQUARE_SUM))


@dataclass(frozen=True)
class StubPolicy:
    """Freezes what ``choose`` says; remembers the numbers of the checks it has seen."""

    choose: Callable[[Check], np.ndarray] = field(repr=False)  # a lambda: its address would differ
    check_interval: int = 2
    measurement: Measurement | None = MEASUREMENT
    wrong: tuple[str, ...] = ()

    def errors(self) -> Iterator[str]:
        yield from self.wrong

    def start(self, check: Check) -> Decision:
        return self._decision([], check)

    def decide(self, before: Decision, check: Check) -> Decision:
        return self._decision(before.memory["numbers"], check)

    def _decision(self, numbers: list[int], check: Check) -> Decision:
        frozen = self.choose(check)
        memory = {"numbers": [*numbers, check.number]}
        return Decision(frozen, memory, {"frozen_tensors": int(frozen.sum())})


class StubMeter:
    """Measures, for each tensor, its weight in ``weights`` times the steps of the interval.

    Args:
        weights: By name, for every tensor of the model; squares of it stand for the other metric.
        names: The tensors of one rank, in its order.
        on_call: Told the name of every call that does something.
    """

    n_bytes = 96

    def __init__(
        self,
        names: Sequence[str],
        weights: Mapping[str, float],
        on_call: Callable[[str], None] = lambda call: None,
    ) -> None:
        self._names = list(names)
        self._weights = weights
        self._on_call = on_call
        self._n_steps = 1000  # nonsense until the first interval begins

    def begin(self) -> None:
        self._on_call("begin")
        self._n_steps = 0

    def add_step(self, frequency: np.ndarray) -> None:
        self._on_call("add_step")
        self._n_steps += 1

    def take(self) -> dict[Metric, list[float]]:
        self._on_call("take")
        n_steps, self._n_steps = self._n_steps, 0
        sums = [n_steps * self._weights[name] for name in self._names]
        return {Metric.ABS_SUM: sums, Metric.SQUARE_SUM: [value**2 for value in sums]}

    def state_dict(self) -> dict[str, Tensor]:
        return {f"steps.{name}": torch.tensor(self._n_steps) for name in self._names}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        (n_steps,) = {int(state_dict[f"steps.{name}"]) for name in self._names}
        self._n_steps = n_steps


def choose_by_number(*masks: np.ndarray) -> Callable[[Check], np.ndarray]:
    """Freeze ``masks[K]`` from check K on, the last of them for good."""
    return lambda check: masks[min(check.number, len(masks) - 1)]
