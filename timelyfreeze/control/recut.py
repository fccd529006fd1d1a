"""The freezing state of a run whose model is cut into other stages, or run by other ranks, now.

What a policy has decided and measured is of tensors, and tensors keep their names and their order
wherever a model is cut. A plan is of stages and does not carry over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from timelyfreeze.control.replica_states import begin_anew
from timelyfreeze.policies import ModelLayout


def is_cut_alike(states: Sequence[Mapping[str, Any]], layout: ModelLayout) -> bool:
    """Return whether each stage has as many tensors as when the states were saved."""
    saved = {stage: len(frozen) for stage, (_, frozen) in _tallies(states).items()}
    stages, counts = np.unique(layout.stages, return_counts=True)
    return saved == dict(zip(stages.tolist(), counts.tolist(), strict=True))


def recut(
    states: Sequence[Mapping[str, Any]],
    layout: ModelLayout,
    stages: Sequence[int],
    number: int,
    n_processes: int,
) -> dict[str, Any]:
    """Return the state that a process goes on from with stages of its own.

    Counts of frozen tensors and gradient energies go where the tensors are: what stays frozen can
    not be measured anew. The sums of the average freeze ratio are handed out evenly.

    Args:
        states: Of all processes that have saved one, by a method with a policy.
        layout: The tensors, cut as they are now.
        stages: What the process holds.
        number: Its own.
        n_processes: How many there are now.

    Raises:
        ValueError: If the model has another number of tensors.
    """
    tallies = _tallies(states)
    # Stage after stage is the order of the model, wherever it is cut.
    frozen = np.concatenate([np.array(of_stage, np.int64) for _, of_stage in tallies.values()])
    if len(frozen) != len(layout.names):
        raise ValueError(
            f"the checkpoint's freezing state is of {len(frozen)} tensors, the model has "
            f"{len(layout.names)}; resume with the same model, or, {begin_anew()}"
        )
    # Every stage runs every microbatch; a process that joined later has counted fewer.
    backwards = max(count for count, _ in tallies.values())
    state = {key: value for key, value in states[0].items() if key != "energy"}
    state["tally"] = {str(s): [backwards, frozen[layout.of_stage(s)].tolist()] for s in stages}
    if (energies := _energies(states)).keys() == tallies.keys():
        energy = np.array([each for s in tallies for each in energies[s]], dtype=object)
        state["energy"] = {str(s): energy[layout.of_stage(s)].tolist() for s in stages}
    sums = [sum(of[i] for of in (each["applied"] for each in states)) for i in (0, 1)]
    share, rest = divmod(sums[1], n_processes)
    state["applied"] = [sums[0] / n_processes, share + (number < rest)]
    losses = [loss for each in states for loss in each.get("losses", {}).values()]
    if losses:
        # Only who has the last stage takes them.
        state["losses"] = {str(stage): losses[0] for stage in stages}
    return state


def _tallies(states: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, Sequence[int]]]:
    """Return {stage: (backwards, of each tensor in how many it was frozen)}, front to back."""
    by_stage = {int(s): (n, frozen) for each in states for s, (n, frozen) in each["tally"].items()}
    return dict(sorted(by_stage.items()))


def _energies(states: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[float | None]]:
    """Return {stage: gradient energy of each tensor} of stages whose energy was measured."""
    return {int(s): found for each in states for s, found in each.get("energy", {}).items()}
