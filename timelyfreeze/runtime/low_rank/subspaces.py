"""The subspaces of a process's linear weights from step to step, and what is saved of them.

By default an optimizer steps the weights, and each subspace turns once a step. Or the weights learn
in the subspaces alone, with moments of their own (:class:`SubspaceAdam`): between two turns of Q a
weight is W_0 + R Q^T. Its gradient by R is G Q, so R is stepped as any parameter is, and W moves by
each step's change of R times Q^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from timelyfreeze.runtime.low_rank.captured import CapturedMeter, Energies
from timelyfreeze.runtime.low_rank.layers import LowRankLayers
from timelyfreeze.runtime.low_rank.subspace import lifted, next_basis, projected
from timelyfreeze.settings import key

# Gradients of live microbatches fade by this factor a step before directions are looked for.
_MEMORY = 0.7
_ITERATIONS = 3
# A head has a row for each word of a vocabulary. A few directions hold little of what it learns.
_MOST_ROWS = 16


class Subspaces:
    """Subspaces that turn after each step's gradients, whose weights an optimizer steps.

    In the warm-up, which they begin at random, they turn several times a step.

    Args:
        layers: Of the stages of this process.
        seed: Of directions that are tried.
    """

    def __init__(self, layers: Sequence[LowRankLayers], seed: int) -> None:
        self._layers, self._seed, self._step, self._n_turns = tuple(layers), seed, 0, 1
        self._captured, self._is_measured = CapturedMeter(seed), False

    def begin_step(self, step: int, *, is_warm: bool) -> None:
        """Enter an optimizer step.

        Args:
            step: Its number.
            is_warm: Whether it comes after the warm-up.
        """
        self._step, self._n_turns = step, 1 if is_warm else _ITERATIONS
        if not self._is_measured:
            self._captured.forget()
        self._is_measured = False

    def energies(self) -> Energies:
        """Return what exact gradients have inside of the subspaces, and in all. Waits for devices.

        To be called before :meth:`end_batch`: directions are not to be judged by the gradient that
        they were turned by.
        """
        self._is_measured = True
        return self._captured.measure(
            (name, weight, layers.bases[name]) for layers, name, weight in self._weights()
        )

    def end_batch(self, index: int, n_microbatches: int) -> None:
        """Leave the batch of that index of the step; its gradients are there, and reduced."""
        if index == 0:
            for layers, name, weight in self._weights():
                if weight.grad is not None:
                    self._turn(layers, name, weight.grad, self._n_turns)

    def _weights(self) -> Iterator[tuple[LowRankLayers, str, Tensor]]:
        for layers in self._layers:
            for name, weight in layers.weights.items():
                yield layers, name, weight

    def _turn(self, layers: LowRankLayers, name: str, gradient: Tensor, n_turns: int) -> None:
        basis = layers.bases[name]
        for place in range(n_turns):
            basis = next_basis(basis, gradient, self._seed, self._step, name, place)
        layers.bases[name] = basis

    def end_step(self) -> None:
        """Leave the step, whose weights have moved."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps, by ``"<kind>.<weight>"``; loading writes into copies."""
        bases = {name: layers.bases[name] for layers, name, _ in self._weights()}
        kept = {f"basis.{name}": basis.clone() for name, basis in bases.items()}
        return kept | self._captured.tensors(bases)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with what :meth:`tensors` returned.

        Raises:
            ValueError: If a weight has none, or one of another rank.
        """
        for layers in self._layers:
            layers.load({name: saved.get(f"basis.{name}") for name in layers.names})
        self._captured.load(saved, [name for _, name, _ in self._weights()])

    def close(self) -> None:
        """Leave optimizers alone."""


class SubspaceAdam(Subspaces):
    """AdamW in the subspaces, in the place of what an optimizer does to these weights.

    Betas, eps and weight decay are those of the weight's group in the optimizer, and the learning
    rate follows its schedule. Directions are looked for in the gradients of live microbatches, and
    moments begin anew with them. Weights with far more rows than columns, as of a head, stay with
    the optimizer.

    Args:
        layers: Of the stages of this process, whose weights are not sharded.
        seed: Of directions that are tried.
        optimizers: What steps the weights otherwise.
        rate: Learning rate of R where that of the optimizer is the one that it began with.
        every: Steps after which directions are looked for anew.
    """

    def __init__(
        self,
        layers: Sequence[LowRankLayers],
        seed: int,
        optimizers: Sequence[Optimizer],
        *,
        rate: float,
        every: int,
    ) -> None:
        super().__init__(layers, seed)
        self._rate, self._every = rate, every
        self._learns_inside, self._n_microbatches = False, 0
        self._n_steps = 0  # since directions are what they are
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._recent: dict[str, Tensor] = {}
        self._undo: list[Callable[[], None]] = [
            each.register_step_pre_hook(self._before_step).remove for each in optimizers
        ]

    def energies(self) -> Energies:
        """Return the same twice: live microbatches, too, teach only what lies inside."""
        return Energies(inside=1.0, whole=1.0)

    def begin_step(self, step: int, *, is_warm: bool) -> None:
        """Enter an optimizer step; before the first inside, look for directions."""
        super().begin_step(step, is_warm=is_warm)
        if is_warm and not self._learns_inside:
            self._look()
        self._learns_inside, self._n_microbatches = is_warm, 0
        for layers in self._layers:
            layers.n_frozen.clear()

    def end_batch(self, index: int, n_microbatches: int) -> None:
        """Leave a batch; weights that the optimizer steps have subspaces that turn each step."""
        self._n_microbatches += n_microbatches
        for layers, name, weight in self._weights() if index == 0 else ():
            if weight.grad is not None and _is_head(weight):
                self._turn(layers, name, weight.grad, self._n_turns)
            elif weight.grad is not None and not self._learns_inside:
                self._note(name, weight.grad.float())

    def _before_step(self, optimizer: Optimizer, *args: Any) -> None:
        if not self._learns_inside:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for layers, name, weight in self._weights():
            if id(weight) in groups and weight.grad is not None and not _is_head(weight):
                with torch.no_grad():
                    self._step_inside(layers, name, weight.grad.float(), groups[id(weight)])
                weight.grad = None  # nothing is left for the optimizer to do

    def _step_inside(
        self, layers: LowRankLayers, name: str, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        weight, basis = layers.weights[name], layers.bases[name]
        reduced = projected(gradient, basis)
        # G holds the frozen ones' gradient inside of the subspace only, so that directions outside
        # would always look small: what is inside is brought to the part that live ones have of it.
        share = layers.n_frozen.get(name, 0) / self._n_microbatches
        self._note(name, gradient.sub(lifted(reduced, basis, weight), alpha=share))
        if name not in self._moments:
            self._moments[name] = torch.zeros_like(reduced), torch.zeros_like(reduced)
        first, second = self._moments[name]
        (beta_1, beta_2), n = group["betas"], self._n_steps + 1
        first.lerp_(reduced, 1.0 - beta_1)
        second.lerp_(reduced.square(), 1.0 - beta_2)
        change = (first / (1.0 - beta_1**n)) / ((second / (1.0 - beta_2**n)).sqrt() + group["eps"])
        schedule = group["lr"] / group.get("initial_lr", group["lr"])
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        weight.sub_(lifted(change, basis, weight).to(weight.dtype), alpha=self._rate * schedule)

    def _note(self, name: str, live: Tensor) -> None:
        """Remember what live microbatches gave, as far as one can tell."""
        known = self._recent.get(name)
        self._recent[name] = live.clone() if known is None else known.mul_(_MEMORY).add_(live)

    def end_step(self) -> None:
        """Leave the step; look for directions anew if it is time."""
        self._n_steps += self._learns_inside
        if self._n_steps >= self._every:
            self._look()

    def _look(self) -> None:
        """Look for directions in what live microbatches gave, and begin with them anew."""
        self._n_steps = 0
        self._moments.clear()
        for layers in self._layers:
            for name in layers.names & self._recent.keys():
                self._turn(layers, name, self._recent[name], _ITERATIONS)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps; moments that were not begun are 0."""
        kept = super().tensors() | {
            "n_steps": torch.tensor(self._n_steps),
            "learns_inside": torch.tensor(self._learns_inside),
        }
        for layers, name, weight in self._weights():
            whole = torch.zeros_like(weight, dtype=torch.float32)
            inside = projected(whole, layers.bases[name])
            first, second = self._moments.get(name, (inside, inside))
            found = {"first": first, "second": second, "recent": self._recent.get(name, whole)}
            if not _is_head(weight):
                kept |= {f"{kind}.{name}": tensor.clone() for kind, tensor in found.items()}
        return kept

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with what :meth:`tensors` returned."""
        super().load(saved)
        if "n_steps" not in saved:
            raise ValueError(
                f"the checkpoint has no moments of subspaces; this run has {key('subspace_rate')} "
                f"{self._rate}; resume with the value that it was saved with"
            )
        self._n_steps = int(saved["n_steps"])
        self._learns_inside = bool(saved["learns_inside"])
        for _, name, weight in self._weights():
            if not _is_head(weight):
                self._moments[name] = saved[f"first.{name}"], saved[f"second.{name}"]
                self._recent[name] = saved[f"recent.{name}"]

    def close(self) -> None:
        """Leave optimizers alone."""
        for undo in self._undo:
            undo()


def _is_head(weight: Tensor) -> bool:
    return bool(weight.shape[0] > _MOST_ROWS * weight.shape[1])
