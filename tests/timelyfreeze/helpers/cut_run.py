"""A model cut into stages and frozen, in one process, and the same model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from tests.timelyfreeze.helpers.stages import N_MICROBATCHES
from timelyfreeze import TimelyFreeze, partition_model
from timelyfreeze.control import merge_ranks
from timelyfreeze.runtime import FreezingStage, named_order, run_in_order, stages_of

N_STAGES, VOCABULARY = 4, 64
SCHEDULES = {"1F1B": 4, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # with their numbers of ranks
SHORT = {
    "last_warmup_step": 1, "last_monitor_step": 5, "last_ramp_step": 6, "discard_batches": 0,
    "min_gain": -1.0, "max_freeze_ratio": 0.6,
}  # fmt: skip


def make_tokens() -> tuple[Tensor, Tensor]:
    """Tokens, which are their own labels."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2 * N_MICROBATCHES, 8), generator=random)
    return tokens, tokens


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def exact_gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    """Gradients of a model in one piece, for each microbatch, by name."""
    found = []
    for x, y in zip(*(t.chunk(N_MICROBATCHES) for t in batch), strict=True):
        model.zero_grad()
        loss_of(model(x)[0], y).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


class Run:
    """Steps of some stages of a cut model, in which nothing is learned."""

    def __init__(
        self,
        schedule: Any,
        modules: list[nn.Module],
        batch: tuple[Tensor, Tensor],
        *,
        has_first: bool = True,
        **arguments: Any,
    ) -> None:
        self.schedule, self.modules = schedule, modules
        self.inputs, self.labels = batch[: int(has_first)], batch[1]
        self.freezer = TimelyFreeze(schedule, **{**SHORT, **arguments})
        self.stages: list[FreezingStage] = stages_of(self.schedule)
        self.masks: dict[int, Any] = {}
        self.subspaces: dict[str, tuple[Tensor, bool]] = {}
        for stage in self.stages:
            stage.freeze = self._noting(stage)

    def _noting(self, stage: FreezingStage) -> Callable[..., None]:
        def freeze(masks: Any, **others: Any) -> None:
            self.masks[stage.stage_index] = {m: mask.copy() for m, mask in masks.items()}
            for group in stage.low_rank.groups if stage.low_rank else ():
                basis = stage.low_rank.bases[group.name].clone(), group.of_inputs
                self.subspaces.update(dict.fromkeys(group.names, basis))
            FreezingStage.freeze(stage, masks, **others)

        return freeze

    @property
    def parameters(self) -> list[tuple[str, Tensor]]:
        return [named for module in self.modules for named in module.named_parameters()]

    def step(self, t: int) -> dict[str, Tensor | None]:
        """Run a step, and return the gradients that it leaves, by name."""
        self.masks.clear()
        with self.freezer.step(t):
            self.schedule.step(*self.inputs, target=self.labels, losses=[])
        gradients = {name: p.grad for name, p in self.parameters}
        for _, parameter in self.parameters:
            parameter.grad = None
        return gradients

    def expected(self, exact: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
        """What the masks leave of exact gradients: nothing, or the part in a subspace."""
        sums: dict[str, Tensor | None] = {name: None for name, _ in self.parameters}
        for stage in self.stages:
            for i, name in enumerate(stage.parameter_names):
                for m, gradients in enumerate(exact):
                    mask = self.masks.get(stage.stage_index, {}).get(m)
                    part = gradients.get(name)
                    if mask is not None and mask[i] and part is not None:
                        part = self._projected(name, part)
                    if part is not None:
                        sums[name] = part if sums[name] is None else sums[name] + part
        return sums

    def _projected(self, name: str, gradient: Tensor) -> Tensor | None:
        if name not in self.subspaces:
            return None
        q, of_inputs = self.subspaces[name]
        return gradient @ q @ q.t() if of_inputs else q @ (q.t() @ gradient)

    def check(self, exact: list[dict[str, Tensor]], last: int = 8) -> None:
        """Run steps of all phases, and compare gradients in each."""
        n_frozen = 0
        for t in range(1, last + 1):
            found = self.step(t)
            for name, want in self.expected(exact).items():
                assert (found[name] is None) == (want is None), (t, name)
                if want is not None:
                    # Which microbatches are frozen follows from times, and so does the rounding.
                    size = max(float(of[name].abs().max()) for of in exact if name in of)
                    close = {"rtol": 1e-5, "atol": 1e-6 * max(1.0, size)}
                    torch.testing.assert_close(found[name], want, **close)
            n_frozen += sum(int(mask.sum()) for of in self.masks.values() for mask in of.values())
        assert n_frozen
        assert self.freezer.plan is not None
        self.freezer.close()


def emulated(model: nn.Module, name: str, batch: tuple[Tensor, Tensor], **arguments: Any) -> Run:
    """Return a run of all stages in this process, under the order of a schedule."""
    modules = partition_model(model, N_STAGES, batch[0][:1])
    stages = [
        PipelineStage(part, s, N_STAGES, torch.device("cpu")) for s, part in enumerate(modules)
    ]
    schedule = torch_schedules.ScheduleLoopedBFS(
        stages, N_MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )
    n_ranks = SCHEDULES[name]
    order = named_order(name, n_ranks, N_MICROBATCHES, stages_per_rank=N_STAGES // n_ranks)
    run_in_order(schedule, merge_ranks(order))
    return Run(schedule, modules, batch, **arguments)


def checked(model: nn.Module, name: str, batch: tuple[Tensor, Tensor], **arguments: Any) -> Run:
    """Run a model without tied weights, compared with a copy in one piece."""
    exact = exact_gradients(copy.deepcopy(model), batch)
    run = emulated(model, name, batch, **arguments)
    run.check(exact)
    return run
