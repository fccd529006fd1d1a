"""Comparisons of a run that is resumed are those of one that never stopped."""

import copy
import itertools
import json
from typing import Any

import pytest
import torch

from tests.timelyfreeze.helpers.layered import make_parts
from tests.timelyfreeze.runtime.reference.test_comparator import Noting, Run

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]

STOPS = [4, 5, 6, 9, 10]


@pytest.fixture(scope="module")
def whole() -> tuple[Run, dict[int, Any]]:
    """A run that never stopped, and what there was at each of ``STOPS``."""
    run, found = Run(), {}
    for last, stop in itertools.pairwise([0, *STOPS]):
        run.steps(last + 1, stop)
        found[stop] = (
            json.dumps(run.checks.plain_state()),
            {name: tensor.clone() for name, tensor in run.checks.tensor_state().items()},
            copy.deepcopy([part.state_dict() for part in run.parts]),
            len(run.seen),
        )
    run.steps(STOPS[-1] + 1, 17)
    return run, found


@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_run_decides_as_one_that_never_stopped(
    stop: int, whole: tuple[Run, dict[int, Any]]
) -> None:
    undisturbed, found = whole
    text, tensors, weights, n_before = found[stop]
    state = json.loads(text)
    resumed = Run(seed=1)
    for part, saved in zip(resumed.parts, weights, strict=True):
        part.load_state_dict(saved)
    room = resumed.checks.tensors_to_load(list(tensors))
    assert {n: t.shape for n, t in room.items()} == {n: t.shape for n, t in tensors.items()}
    state["policy"]["policy"] = resumed.checks.plain_state()["policy"]["policy"]
    resumed.checks.load_plain_state(state)
    resumed.checks.load_tensor_state(tensors)
    resumed.steps(stop + 1, 17)
    assert len(resumed.seen) == len(undisturbed.seen) - n_before
    for a, b in zip(undisturbed.seen[n_before:], resumed.seen, strict=True):
        assert a.observed == b.observed
    assert undisturbed.checks.decision.memory == resumed.checks.decision.memory
    assert undisturbed.frozen_layers() == 3


def test_without_the_saved_copy_it_is_made_of_the_weights_that_are_there() -> None:
    reference = Noting()
    whole = Run()
    whole.steps(1, 6)
    resumed = Run(reference, seed=1)
    resumed.checks.load_plain_state(whole.checks.plain_state())
    resumed.steps(7, 7)
    assert [str(what) for what in reference.happened] == ["load", "offer 7", "take"]
    first: Any = make_parts(seed=1)[0]
    copied: Any = reference.loaded[0][0]
    assert torch.equal(copied.up.weight, first.layers["0"].up.weight)
