"""States that ask a checkpoint for what it has, not for what they would save now.

torch loads the keys that a state would save, and fails where one is missing. What processes have
saved of their own has other keys where their number was another, an optimizer has no state for a
tensor that was never updated, and a model that was trained without adapters has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch
from torchtitan.components.checkpoint import OPTIMIZER
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from torchtitan.lora.names import is_adapter

_STATE = "state."


@runtime_checkable
class Resizable(Protocol):
    """A state of which processes save parts of their own, under keys of their own."""

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load where a checkpoint has ``keys`` of this state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was loaded."""
        ...


class _FittedOptimizers:
    """Optimizers for a checkpoint in which tensors that were never updated have no state.

    They get the state that they had then: zeros, as before a first update.
    """

    def __init__(self, optimizers: OptimizersContainer, keys: Collection[str]) -> None:
        self._keys = frozenset(keys)
        self._optimizers = optimizers
        self._without: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        every = self._optimizers.state_dict()
        self._without = {
            key: value
            for key, value in every.items()
            if key.startswith(_STATE) and key not in self._keys
        }
        return {key: value for key, value in every.items() if key not in self._without}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, value in self._without.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"the checkpoint has no optimizer.{key}, which is no tensor")
            value.zero_()
        if self._without:
            logger.info(
                "%d tensors of the optimizers' state are not in the checkpoint, since what they "
                "belong to was never updated: they begin with zeros",
                len(self._without),
            )
        self._optimizers.load_state_dict({**state_dict, **self._without})


def fitted_states(states: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return states that ask for what a checkpoint has.

    Args:
        states: By name, as a checkpoint manager hands them to torch.
        keys: Full names of what the checkpoint has.
    """

    def of(name: str) -> list[str]:
        return [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]

    known = frozenset(keys)
    new = [name for name in states if is_adapter(name) and name not in known]
    if new:
        logger.info("The checkpoint has no adapters: %d tensors of them begin anew", len(new))
    fitted = {name: state for name, state in states.items() if name not in new}
    for name, state in fitted.items():
        if isinstance(state, Resizable):
            fitted[name] = SimpleNamespace(
                state_dict=partial(state.state_to_load, of(name)),
                load_state_dict=state.load_state_dict,
            )
        elif name == OPTIMIZER and isinstance(state, OptimizersContainer):
            held = of(name)
            # Without any state it is a checkpoint of something else, which torch tells.
            if any(key.startswith(_STATE) for key in held):
                fitted[name] = _FittedOptimizers(state, held)
    return fitted
