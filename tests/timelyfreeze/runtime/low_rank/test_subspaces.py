"""The subspaces of two layers from step to step: when they turn, and how a resumed run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.runtime.low_rank.test_subspace import next_basis
from timelyfreeze.runtime.linear import StageLinears
from timelyfreeze.runtime.low_rank import Subspaces, first_basis
from timelyfreeze.settings import PhaseSchedule

SEED, RANKS = 7, (1, 2)


class Run:
    """A wide and a tall layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.ModuleDict({"wide": nn.Linear(7, 4), "tall": nn.Linear(4, 7)})
        self.layers = StageLinears(self.module)
        self.layers.learn_frozen(RANKS[-1], partial(first_basis, seed=SEED))
        self.subspaces = Subspaces([self.layers], SEED, RANKS)

    def begin(self, step: int, *, is_warm: bool) -> None:
        self.subspaces.begin_step(PhaseSchedule.unplanned(0 if is_warm else step).at(step))
        for name, weight in self.layers.weights.items():
            weight.grad = gradient_of(name, weight, step)


def gradient_of(name: str, weight: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return 1.0 + torch.randn(weight.shape, generator=generator)


def test_they_turn_several_times_a_step_in_the_warm_up() -> None:
    run = Run()
    expected = dict(run.layers.bases)
    for step in (1, 2):
        run.begin(step, is_warm=False)
        for index in range(2):  # two batches
            run.subspaces.end_batch(index)
        for name, weight in run.layers.weights.items():
            for place in range(3):
                gradient = gradient_of(name, weight, step)
                expected[name] = next_basis(expected[name], gradient, SEED, step, name, place)
        assert all(torch.equal(run.layers.bases[name], q) for name, q in expected.items())


def test_they_wait_until_the_warm_up_is_about_to_end() -> None:
    run = Run()
    turned = []
    for step in range(1, 21):
        before = dict(run.layers.bases)
        run.subspaces.begin_step(PhaseSchedule.unplanned(20).at(step))
        for name, weight in run.layers.weights.items():
            weight.grad = gradient_of(name, weight, step)
        run.subspaces.end_batch(0)
        changed = [not torch.equal(run.layers.bases[n], q) for n, q in before.items()]
        assert set(changed) == {run.subspaces.prepares}
        turned.append(run.subspaces.prepares)
    assert turned == [False] * 8 + [True] * 12


def test_later_each_turns_once_in_four_steps() -> None:
    run = Run()
    turned: dict[str, list[int]] = {name: [] for name in run.layers.weights}
    for step in range(11, 19):
        before = dict(run.layers.bases)
        run.begin(step, is_warm=True)
        for index in range(2):
            run.subspaces.end_batch(index)
        for name, weight in run.layers.weights.items():
            if not torch.equal(run.layers.bases[name], before[name]):
                turned[name].append(step)
                gradient = gradient_of(name, weight, step)
                once = next_basis(before[name], gradient, SEED, step, name)
                assert torch.equal(run.layers.bases[name], once)
    assert all(second - first == 4 for first, second in turned.values())


def test_turns_are_made_in_what_tells_their_time() -> None:
    run, seen = Run(), []

    @contextmanager
    def noted() -> Iterator[None]:
        before = dict(run.layers.bases)
        yield
        seen.append(all(run.layers.bases[name] is not before[name] for name in before))

    run.layers.timed_update = noted
    run.begin(1, is_warm=False)
    run.subspaces.end_batch(0)
    run.subspaces.end_batch(1)
    assert seen == [True]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_resumed_one_goes_on_to_the_last_bit(stopped_at: int, rank: int) -> None:
    whole, resumed = Run(), Run()
    found: dict[int, Any] = {}
    for step in range(1, 5):
        for run in (whole, resumed) if step > stopped_at else (whole,):
            run.begin(step, is_warm=step > 3)
            found.setdefault(step, []).append(run.subspaces.energies())
            run.subspaces.end_batch(0)
            if step == 3:
                run.subspaces.keep(rank)
        if step == stopped_at:
            saved = whole.subspaces.tensors()
            shapes = {name: tensor.shape for name, tensor in resumed.subspaces.tensors().items()}
            assert {name: tensor.shape for name, tensor in saved.items()} == shapes
            if step == 3:
                resumed.subspaces.keep(rank)
            resumed.subspaces.load(saved)
    assert found[4][0].agreed != 0.0
    assert all(len(set(both)) == 1 for both in found.values())
    assert all(torch.equal(resumed.layers.bases[n], q) for n, q in whole.layers.bases.items())


def test_energies_are_those_of_the_first_directions_of_each_rank() -> None:
    run = Run()
    for step in range(1, 5):
        run.begin(step, is_warm=False)
        run.subspaces.energies()
        bases = {name: basis.clone() for name, basis in run.layers.bases.items()}
        run.subspaces.end_batch(0)
    for rank in RANKS:
        inside = 0.0
        for name, weight in run.layers.weights.items():
            q, g = bases[name][:, :rank].double(), weight.grad.double()
            inside += float(((g @ q) if name == "tall.weight" else (g.t() @ q)).square().sum())
        assert run.subspaces.measured[rank].inside == pytest.approx(inside, rel=1e-5)
    few, many = (run.subspaces.measured[rank] for rank in RANKS)
    assert (few.whole, few.agreed) == (many.whole, many.agreed)
    assert few.agreed_inside != many.agreed_inside
    run.subspaces.keep(RANKS[0])
    run.begin(5, is_warm=True)
    kept = run.subspaces.energies()
    assert kept == run.subspaces.measured[RANKS[1]], "no more directions are left"
    assert kept.agreed_inside != kept.agreed


def test_shares_are_multiplications_for_each_token() -> None:
    assert Run().subspaces.shares == (2 * (4 + 7), 2 * 4 * 7)


def test_what_is_saved_goes_by_weight_since_each_rank_saves_its_own() -> None:
    run = Run()
    kinds: dict[str, set[str]] = {}
    for key in run.subspaces.tensors():
        kind, _, weight = key.partition(".")
        kinds.setdefault(kind, set()).add(weight)
    assert all(weights == set(run.layers.weights) for weights in kinds.values())


def test_gradients_that_nobody_measures_are_let_go() -> None:
    run = Run()
    for step in range(1, 4):
        run.begin(step, is_warm=False)
        run.subspaces.energies()
        run.subspaces.end_batch(0)
    assert run.subspaces.tensors()["sketch.wide.weight"].any()
    for step in (4, 5):
        run.begin(step, is_warm=True)
        run.subspaces.end_batch(0)
    assert not run.subspaces.tensors()["sketch.wide.weight"].any()
