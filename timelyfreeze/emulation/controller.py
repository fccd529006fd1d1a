"""The freeze controller of a pipeline whose ranks are all in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from timelyfreeze.control import FreezeController, FreezingState, stages_of_ranks, state_of
from timelyfreeze.emulation.state import merge_states, split_state


class EmulatedState(FreezingState):
    """Saves a state for each rank, and restores the states of all.

    A checkpoint of an emulated pipeline resumes on as many devices as it has ranks, and the other
    way round.
    """

    def parts(self, state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return {rank: what it would have saved}."""
        return dict(enumerate(split_state(state, self.declared)))

    def own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state of all ranks together."""
        ranks = stages_of_ranks(self.declared)
        ranks_states = [state_of(states, stages, i, len(ranks)) for i, stages in enumerate(ranks)]
        return merge_states(ranks_states, self.declared)


class EmulatedController(FreezeController):
    """A controller that holds the stages of every rank and saves its state as the ranks would."""

    state_type = EmulatedState
