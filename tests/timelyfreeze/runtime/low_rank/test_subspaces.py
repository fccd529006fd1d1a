"""Weights that learn in their subspaces, against torch's AdamW on R."""

import copy

import pytest
import torch
from torch import nn

from timelyfreeze.runtime.low_rank import LowRankLayers, SubspaceAdam, Subspaces
from timelyfreeze.runtime.low_rank.subspace import lifted, next_basis, projected

SEED, RANK, EVERY, N_MICROBATCHES = 7, 2, 3, 4
LR, RATE = 0.05, 0.4


class Run:
    """A wide and a tall layer, and a head, and what steps them."""

    def __init__(self, *, gamma=1.0):
        torch.manual_seed(0)
        self.module = nn.ModuleDict(
            {"wide": nn.Linear(7, 4), "tall": nn.Linear(4, 7), "head": nn.Linear(3, 50)}
        )
        named = dict(self.module.named_parameters())
        weights = {n: p for n, p in named.items() if n.endswith("weight")}
        self.layers = LowRankLayers(weights, self.module, rank=RANK, seed=SEED)
        self.weights = {n: p for n, p in weights.items() if n != "head.weight"}
        self.optimizer = torch.optim.AdamW(named.values(), lr=LR, weight_decay=0.3, eps=1e-3)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)
        self.subspaces = SubspaceAdam([self.layers], SEED, [self.optimizer], rate=RATE, every=EVERY)

    def step(self, step, *, learns_inside=True, n_frozen=0):
        self.subspaces.begin_step(step, is_warm=learns_inside)
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradient_of(name, parameter, step)
            self.layers.n_frozen[name] = n_frozen
        self.subspaces.end_batch(0, N_MICROBATCHES)
        self.optimizer.step()
        self.subspaces.end_step()
        self.schedule.step()

    def copies(self):
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def gradient_of(name, parameter, step):
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(parameter.shape, generator=generator)


def test_each_step_is_adamw_on_r_with_a_rate_of_its_own():
    run = Run(gamma=0.5)
    before, bases = run.copies(), dict(run.layers.bases)
    inside = {
        n: nn.Parameter(projected(torch.zeros_like(w), bases[n])) for n, w in run.weights.items()
    }
    adam = torch.optim.AdamW(inside.values(), lr=RATE, weight_decay=0.0, eps=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
    expected = {n: before[n].clone() for n in inside}
    for step in range(1, EVERY):
        run.step(step)
        old = {n: r.detach().clone() for n, r in inside.items()}
        for n, r in inside.items():
            r.grad = projected(gradient_of(n, run.weights[n], step), bases[n])
        adam.step()
        for n, r in inside.items():
            moved = lifted(r.detach() - old[n], bases[n], run.weights[n])
            expected[n] = expected[n] * (1.0 - LR * 0.5 ** (step - 1) * 0.3) + moved
        schedule.step()
        torch.testing.assert_close(dict(run.weights), expected, check_dtype=False)
    assert all(weight.grad is None for weight in run.weights.values())
    after = run.copies()
    assert not torch.equal(after["wide.bias"], before["wide.bias"]), "its optimizer steps the rest"


def test_in_the_warm_up_the_optimizer_steps_weights_and_gradients_are_noted():
    run, plain = Run(), Run()
    plain.subspaces.close()
    bases = dict(run.layers.bases)
    for each in (run, plain):
        each.step(1, learns_inside=False)
    torch.testing.assert_close(run.copies(), plain.copies(), rtol=0, atol=0)
    run.subspaces.begin_step(2, is_warm=True)
    for name, weight in run.weights.items():
        basis = bases[name]
        for place in range(3):
            basis = next_basis(basis, gradient_of(name, weight, 1), SEED, 2, name, place)
        assert torch.equal(run.layers.bases[name], basis)


def test_a_head_stays_with_the_optimizer_and_its_directions_turn_each_step():
    run, plain = Run(), Run()
    plain.subspaces.close()
    basis = run.layers.bases["head.weight"]
    for step in (1, 2):
        run.step(step, learns_inside=step == 2)
        plain.step(step, learns_inside=False)
        gradient = gradient_of("head.weight", run.module["head"].weight, step)
        for place in range(3 if step == 1 else 1):  # step 1 is of the warm-up
            basis = next_basis(basis, gradient, SEED, step, "head.weight", place)
    assert torch.equal(run.layers.bases["head.weight"], basis)
    assert torch.equal(run.module["head"].weight, plain.module["head"].weight)


@pytest.mark.parametrize("n_frozen", [0, 3])
def test_directions_come_from_what_live_microbatches_gave(n_frozen):
    """The part inside of the old ones, which all gave, counts as that of the live ones."""
    run = Run()
    bases, recent = dict(run.layers.bases), {}
    for step in range(1, EVERY + 1):
        run.step(step, n_frozen=n_frozen)
        for name, weight in run.weights.items():
            gradient = gradient_of(name, weight, step)
            inside = lifted(projected(gradient, bases[name]), bases[name], weight)
            live = gradient - n_frozen / N_MICROBATCHES * inside
            recent[name] = 0.7 * recent[name] + live if name in recent else live
    for name in recent:
        basis = bases[name]
        for place in range(3):
            basis = next_basis(basis, recent[name], SEED, EVERY, name, place)
        torch.testing.assert_close(run.layers.bases[name], basis)


def test_moments_begin_anew_with_the_directions():
    """The first step of Adam is the gradient's sign, but for eps."""
    run = Run()
    for step in range(1, EVERY + 1):
        run.step(step)
    before, bases = run.copies(), dict(run.layers.bases)
    run.step(EVERY + 1)
    for name, weight in run.weights.items():
        reduced = projected(gradient_of(name, weight, EVERY + 1), bases[name])
        moved = RATE * lifted(reduced / (reduced.abs() + 1e-3), bases[name], weight)
        torch.testing.assert_close(weight.detach(), before[name] * (1.0 - LR * 0.3) - moved)


@pytest.mark.parametrize("stopped_at", [1, EVERY, EVERY + 1])
def test_a_resumed_one_goes_on_to_the_last_bit(stopped_at):
    whole, resumed = Run(), Run()
    for step in range(1, 2 * EVERY + 1):
        whole.step(step, n_frozen=1)
        if step == stopped_at:
            resumed.module.load_state_dict(whole.module.state_dict())
            resumed.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
            resumed.subspaces.load(whole.subspaces.tensors())
        elif step > stopped_at:
            resumed.step(step, n_frozen=1)
    torch.testing.assert_close(resumed.copies(), whole.copies(), rtol=0, atol=0)


def test_moments_that_were_not_saved_are_named():
    run = Run()
    saved = Subspaces([run.layers], SEED).tensors()
    with pytest.raises(
        ValueError, match=r"no moments of subspaces; this run has subspace_rate 0.4"
    ):
        run.subspaces.load(saved)
