"""Checkpoints of the version before, ffcae4ef: loaded and saved again, and what followed there.

``python -m tests.timelyfreeze.control.test_older_checkpoints FILE`` makes such a file anew, of the
version that runs it.
"""

import copy
import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.ranks import N_TENSORS, PHASES, Ranks, without_stable_times
from tests.timelyfreeze.helpers.stub_policy import StubPolicy
from timelyfreeze.planning.plan import plan_to_json
from timelyfreeze.policies.policy import Check, Metric
from timelyfreeze.runtime.linear import StageLinears
from timelyfreeze.runtime.low_rank import Subspaces, first_basis
from timelyfreeze.runtime.meters import GradientEnergy
from timelyfreeze.schedule.order import one_f_one_b_order

FILE = Path(__file__).parents[2] / "assets" / "older_checkpoints.json"
STOPS, LAST = (1, 3, 8), 13
RANKS = (1, 2)  # of subspaces


def choose(check: Check) -> np.ndarray:
    """Freeze by what was measured, so that other vectors would lead to another decision."""
    if not check.metrics:
        return np.zeros(2 * N_TENSORS, dtype=np.bool_)
    return check.metrics[Metric.ABS_SUM] < 12.0 * check.number


class OlderRanks(Ranks):
    """Two ranks with a plan, a policy, gradient energies and subspaces that turn in warm-up."""

    def __init__(self, n_microbatches: int = 2) -> None:
        self.layers: list[StageLinears] = []
        phases = replace(PHASES, monitoring="halves")
        policy = StubPolicy(choose, check_interval=3)
        order = one_f_one_b_order(2, n_microbatches)
        super().__init__(order, policy=policy, phases=phases, batches_per_step=2)
        for controller in self.controllers:
            controller.state.moves = True

    def more_parts(self, rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        linears = StageLinears(nn.ModuleDict({f"w{rank}": nn.Linear(4, 3)}))
        linears.learn_frozen(RANKS[-1], partial(first_basis, seed=7))
        self.layers.append(linears)
        tensors = [nn.Parameter(torch.zeros(4)) for _ in range(N_TENSORS)]
        for number, tensor in enumerate(tensors):
            tensor.grad = torch.full((4,), float(1 + number + rank))
        return {
            "energy": GradientEnergy({rank: tensors}),
            "subspaces": Subspaces([linears], 7, RANKS),
        }

    def set_gradients(self, step: int) -> None:
        """Give the weights of subspaces gradients of warm-up and the upper bound, later none."""
        for linears in self.layers:
            for weight in linears.weights.values():
                values = torch.arange(12.0).reshape(3, 4) * 7.0 + step
                weight.grad = 1.0 + values.cos() if step <= 4 else None

    def one_by_one(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.set_gradients(step)
            self.run(step, step)
            if step % 4 == 0:
                self.on_all(lambda rank: self.controllers[rank].collect(gradient_scale=1.0))


def to_file(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [str(value.dtype).removeprefix("torch."), value.tolist()]
        if isinstance(value, Tensor)
        else json.dumps(json.loads(value), sort_keys=True)
        for key, value in state.items()
    }


def from_file(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        if isinstance(value, str)
        else torch.tensor(value[1], dtype=getattr(torch, value[0]))
        for key, value in state.items()
    }


def made() -> dict[str, Any]:
    """Return what a run holds at some steps, and one that moved after the last of them."""
    ranks, states, before = OlderRanks(), {}, 0
    for stop in (*STOPS, LAST):
        ranks.one_by_one(before + 1, stop)
        states[str(stop)], before = to_file(ranks.saved()), stop
    moved = OlderRanks(n_microbatches=3)
    moved.load(from_file(copy.deepcopy(states["8"])))
    states["left behind"] = to_file(moved.saved())
    moved.one_by_one(9, 10)
    states["moved"] = to_file(moved.saved())
    return states


@cache
def older() -> dict[str, dict[str, Any]]:
    """Return the states of the file."""
    return {name: from_file(state) for name, state in json.loads(FILE.read_text()).items()}


def loaded(name: str, **options: int) -> OlderRanks:
    ranks = OlderRanks(**options)
    ranks.load(copy.deepcopy(older()[name]))
    return ranks


def check_same(ranks: OlderRanks, name: str) -> None:
    """See that a checkpoint of ``ranks`` is that one, but for times of stable batches."""
    mine, theirs = to_file(ranks.saved()), to_file(older()[name])
    assert without_stable_times(mine) == without_stable_times(theirs)


@pytest.mark.parametrize("stop", STOPS)
def test_an_older_checkpoint_is_saved_again_to_the_last_bit(stop: int) -> None:
    assert to_file(loaded(str(stop)).saved()) == to_file(older()[str(stop)])


def test_a_run_goes_on_from_it_as_the_older_version_did() -> None:
    ranks = loaded("8")
    ranks.one_by_one(9, LAST)
    check_same(ranks, str(LAST))


def test_a_run_that_moves_leaves_its_plan_behind_as_the_older_version_did() -> None:
    assert to_file(loaded("8", n_microbatches=3).saved()) == to_file(older()["left behind"])
    moved = loaded("left behind", n_microbatches=3)
    moved.one_by_one(9, 10)
    check_same(moved, "moved")
    plans = [
        [plan_to_json(each.plan) for each in ranks.controllers]
        for ranks in (loaded("8"), loaded("left behind"))
    ]
    assert plans[0] == plans[1]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(made()) + "\n")
