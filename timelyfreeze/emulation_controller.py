"""The freeze controller of a pipeline whose ranks are all in this process."""

from __future__ import annotations

import json
from typing import Any

from timelyfreeze.controller import FreezeController
from timelyfreeze.emulation_state import merge_states, split_state


class EmulatedController(FreezeController):
    """A controller that holds the stages of every rank and saves its state as the ranks would.

    A checkpoint of an emulated pipeline resumes on as many devices as it has ranks, and the other
    way round.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds, with a ``"rank_<r>"`` for each rank."""
        state = super().state_dict()
        whole = json.loads(state.pop("rank_0"))
        parts = split_state(whole, self._declared)
        return {**{f"rank_{rank}": json.dumps(part) for rank, part in enumerate(parts)}, **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the ranks of the pipeline, emulated or not, have saved.

        Raises:
            ValueError: If the checkpoint holds no state for a rank, or was saved under another
                method.
        """
        rest = dict(state_dict)
        parts = []
        for rank in range(self._declared.n_ranks):
            if f"rank_{rank}" not in rest:
                raise ValueError(
                    f"the checkpoint's freezing state has {sorted(state_dict)} but not "
                    f"rank_{rank}; it was saved with another number of ranks than "
                    f"parallelism.pipeline_parallel_degree ({self._declared.n_ranks}); to begin "
                    'freezing anew, set checkpoint.exclude_from_loading = ["freezing"]'
                )
            parts.append(json.loads(rest.pop(f"rank_{rank}")))
        merged = merge_states(parts, self._declared)
        super().load_state_dict({**rest, "rank_0": json.dumps(merged)})
