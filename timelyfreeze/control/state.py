"""What a checkpoint holds of freezing: the parts of a rank's controller, as text and tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_checks import PolicyChecks
from timelyfreeze.control.recut import is_cut_alike, recut
from timelyfreeze.control.replica_states import (
    RANK_KEY,
    begin_anew,
    check_same_pipeline,
    held_stages,
    rank_keys,
    saved_states,
    stages_of_ranks,
    state_of,
)
from timelyfreeze.runtime import Exchange, UpdateMeter
from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.settings import key

logger = logging.getLogger(__name__)

_SCORE = "score."


@dataclass(frozen=True)
class FreezingState:
    """Saves and restores what a rank knows.

    Attributes:
        declared: Order of the whole pipeline, as declared.
        stages: Indexes of the stages that this process holds.
        exchange: Says which process this is.
        planner: Times and plan; None if the method does not plan.
        checks: The policy's decision; None if there is no policy.
        updates: Counts of what was frozen, sums of the average freeze ratio, gradient energies.
    """

    declared: ScheduleOrder
    stages: tuple[int, ...]
    exchange: Exchange
    planner: Planner | None
    checks: PolicyChecks | None
    updates: UpdateMeter

    def save(self) -> dict[str, Any]:
        """Return ``{"rank_<r>": text}`` for a checkpoint.

        The text is JSON with the planner's state, the policy's decision, sums of the average freeze
        ratio, counts of what was frozen and gradient energies: under a key of this rank's own,
        since samples differ from rank to rank. Besides, ``"score.<kind>.<parameter>"`` with a
        tensor for each vector that scores are made from.
        """
        state: dict[str, Any] = {
            "applied": list(self.updates.total),
            **self.updates.plain_state(),
        }
        if self.planner is not None:
            state["planner"] = self.planner.plain_state()
        if self.checks is not None:
            state["policy"] = self.checks.plain_state()
            if (losses := self.checks.plain_losses()) is not None:
                state["losses"] = losses
        parts = self.parts(state)
        return {
            **{f"{RANK_KEY}{number}": json.dumps(part) for number, part in parts.items()},
            **_scores({} if self.checks is None else self.checks.tensor_state()),
        }

    def wanted(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a state with ``keys``: those of all processes, score vectors."""
        mine = [f"{RANK_KEY}{self.exchange.rank}"]
        saved = [k.removeprefix(_SCORE) for k in keys if k.startswith(_SCORE)]
        tensors = {} if self.checks is None else self.checks.tensors_to_load(saved)
        return {**dict.fromkeys(rank_keys(keys) or mine, ""), **_scores(tensors)}

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` returned on all processes, of this number or another.

        A policy without a plan goes on with any pipeline.

        Raises:
            ValueError: If the checkpoint is one of another method, or has a plan for another
                pipeline.
        """
        states = saved_states(state_dict)
        wanted = {"planner": self.planner is not None, "policy": self.checks is not None}
        if any((part in states[0]) != is_wanted for part, is_wanted in wanted.items()):
            raise ValueError(
                f"the checkpoint was saved under another {key('method')} (it has the state of: "
                f"{', '.join(sorted(set(states[0]) & set(wanted)))}); resume with the same one, "
                f"or, {begin_anew()}"
            )
        state = self._state_of_all(states)
        frozen, elements = state["applied"]
        self.updates.total = (frozen, elements)
        self.updates.load_plain_state(state)
        if self.planner is not None:
            self.planner.load_plain_state(state["planner"])
        if self.checks is not None:
            self.checks.load_plain_state(state["policy"])
            if "losses" in state:
                self.checks.load_plain_losses(state["losses"])
            vectors = {k: v for k, v in state_dict.items() if k.startswith(_SCORE)}
            self.checks.load_tensor_state({k.removeprefix(_SCORE): v for k, v in vectors.items()})

    def _state_of_all(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return this process's state, also of another pipeline where nothing is of its stages."""
        if self.planner is not None or self.checks is None:
            check_same_pipeline(states, self.declared)
            return self.own(states)
        layout, alike = self.checks.layout, is_cut_alike(states, self.checks.layout)
        if alike and set(held_stages(states)) == set(stages_of_ranks(self.declared)):
            return self.own(states)
        logger.info("Freezing goes on with another pipeline: of each tensor what was known of it")
        return recut(states, layout, self.stages, self.exchange.rank, self.exchange.size)

    def parts(self, state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return {number of a process: its state} of what this process saves."""
        return {self.exchange.rank: state}

    def own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state that this process goes on from, of those of all that have saved one."""
        if len(states) != self.exchange.size:
            logger.info(
                "Freezing goes on with %d processes where %d have stopped; of the times that they "
                "have measured of a stage, the slowest count",
                self.exchange.size,
                len(states),
            )
        return state_of(states, self.stages, self.exchange.rank, self.exchange.size)


def _scores(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_SCORE}{key}": tensor for key, tensor in tensors.items()}
