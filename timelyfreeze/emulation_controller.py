"""The freeze controller of a pipeline whose ranks are all in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from timelyfreeze.controller import FreezeController
from timelyfreeze.emulation_state import merge_states, split_state
from timelyfreeze.replica_states import RANK_KEY, stages_of_ranks, state_of


class EmulatedController(FreezeController):
    """A controller that holds the stages of every rank and saves its state as the ranks would.

    A checkpoint of an emulated pipeline resumes on as many devices as it has ranks, and the other
    way round.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds, with a ``"rank_<r>"`` for each rank."""
        state = super().state_dict()
        whole = json.loads(state.pop(self._key))
        parts = split_state(whole, self._declared)
        return {
            **{f"{RANK_KEY}{rank}": json.dumps(part) for rank, part in enumerate(parts)},
            **state,
        }

    def _own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state of all ranks together."""
        ranks = stages_of_ranks(self._declared)
        parts = [state_of(states, stages, i, len(ranks)) for i, stages in enumerate(ranks)]
        return merge_states(parts, self._declared)
