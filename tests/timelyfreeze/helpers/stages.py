"""A small pipeline whose stages all live in this process, and the gradients it should get."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.checkpoint import checkpoint

from timelyfreeze.runtime.recorder import ActionRecorder, HostClock
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.schedule.order import Action, ActionKind

VOCABULARY = 13
WIDTH = 5
N_MICROBATCHES = 4
FULL = torch_schedules.ScheduleInterleaved1F1B
SPLIT = torch_schedules.ScheduleInterleavedZeroBubble
LOOPED = torch_schedules.ScheduleLoopedBFS
V_SHAPED = [torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV]
# With one stage, which is first and last.
SINGLE = [torch_schedules.ScheduleGPipe, torch_schedules.Schedule1F1B]
EVERY = [FULL, SPLIT, LOOPED, *V_SHAPED, *SINGLE]
# Of tests that run under several schedules: the examples of one test, for all of them together.
by_schedule = settings(max_examples=settings().max_examples // 5)

Masks = Mapping[int, Mapping[int, np.ndarray]]  # stage -> microbatch -> mask


@contextmanager
def process_group(backend: str = "gloo", world_size: int = 1, rank: int = 0) -> Iterator[None]:
    """A default process group inside this process; "fake" stands for any number of ranks."""
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: Any = FakeStore()
    else:
        store = dist.HashStore()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only make models this small slow
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(n_threads)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.embedding(tokens)))


class Block(nn.Module):
    """Residual, with biases, a norm, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.up.weight
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.sigmoid(self.tied(torch.tanh(self.up(self.norm(hidden))))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden)) * 1.0


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=False)


def make_modules(seed: int = 0) -> list[nn.Module]:
    """First, two middle and last stage."""
    torch.manual_seed(seed)
    return [nn.Sequential(Embedding(), Block()), Block(), Block(), nn.Sequential(Block(), Head())]


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )


def make_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * N_MICROBATCHES, 3)
    tokens, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return tokens, labels


@dataclass
class Ran:
    """What a pass did.

    Attributes:
        gradients: For each stage its parameters' gradients, in the order of its masks.
        sent: Gradient that each stage sent to the one before it, by (stage, microbatch).
        executed: Actions in the order of execution.
    """

    gradients: list[list[Tensor | None]]
    losses: list[Tensor]
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    executed: list[Action] = field(default_factory=list)


class Pipeline:
    """Stages on one rank under a real torch schedule."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        schedule: type,
        *,
        per_tensor: bool = False,
        gradient_rank: int = 0,
        loss_fn: Callable[..., Tensor] = sum_loss,
    ) -> None:
        self.modules = list(modules)
        self.recorder = ActionRecorder(HostClock())
        self.stages = [
            FreezingStage(module, i, len(self.modules), torch.device("cpu"))
            for i, module in enumerate(self.modules)
        ]
        for stage in self.stages:
            stage.attach(self.recorder, per_tensor=per_tensor, gradient_rank=gradient_rank)
        is_single = issubclass(schedule, torch_schedules.PipelineScheduleSingle)
        self.schedule = schedule(
            self.stages[0] if is_single else self.stages,
            n_microbatches=N_MICROBATCHES,
            loss_fn=loss_fn,
            scale_grads=False,
        )

    def run(
        self,
        masks: Masks | None = None,
        batch: tuple[Tensor, Tensor] | None = None,
        cut: Sequence[Collection[int]] | None = None,
    ) -> Ran:
        """One pass; gradients add to what is there. ``cut`` has microbatches by stage."""
        sent: dict[tuple[int, int], Tensor] = {}
        for stage, microbatches in zip(self.stages, cut or [()] * len(self.stages), strict=True):
            own = (masks or {}).get(stage.stage_index, {})
            stage.freeze(own, without_input_grads=microbatches)
            stage.set_local_bwd_input = _spy(stage, sent)
        tokens, labels = batch or make_batch()
        losses: list[Tensor] = []
        with self.recorder.recorded_batch():
            self.schedule.step(tokens, target=labels, losses=losses)
        for stage in self.stages:
            stage.freeze_nothing()
        (record,) = self.recorder.drain()
        return Ran(
            [[p.grad for p in module.parameters()] for module in self.modules],
            losses,
            sent,
            list(record.durations_ms),
        )


def _spy(stage: FreezingStage, sent: dict[tuple[int, int], Tensor]) -> Callable[..., None]:
    """Note what arrives at ``stage`` from the one behind it."""

    def set_local_bwd_input(gradients: tuple[Tensor, ...], microbatch: int) -> None:
        sent[stage.stage_index + 1, microbatch] = gradients[0].clone()
        type(stage).set_local_bwd_input(stage, gradients, microbatch)

    return set_local_bwd_input


def expected(
    modules: Sequence[nn.Module],
    executed: Sequence[Action],
    masks: Masks | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
    n_microbatches: int = N_MICROBATCHES,
) -> Ran:
    """What a plain chain of the same modules gives, one microbatch at a time, times the masks.

    Gradients of microbatches are added in the order in which the pipeline computed them, so that
    equal means equal to the last bit.
    """
    modules = copy.deepcopy(list(modules))
    parameters = [list(module.parameters()) for module in modules]
    tokens, labels = batch or make_batch()
    alone: dict[tuple[int, int], list[Tensor]] = {}
    sent: dict[tuple[int, int], Tensor] = {}
    losses = []
    pairs = zip(tokens.chunk(n_microbatches), labels.chunk(n_microbatches), strict=True)
    for microbatch, (x, y) in enumerate(pairs):
        hidden = [x]
        for module in modules:
            hidden.append(module(hidden[-1]))
        loss = sum_loss(hidden[-1], y)
        losses.append(loss.detach())
        flat = [p for stage in parameters for p in stage]
        found = torch.autograd.grad(loss, [*flat, *hidden[1:-1]])
        for stage, own in enumerate(parameters):
            alone[stage, microbatch], found = list(found[: len(own)]), found[len(own) :]
        sent.update({(stage, microbatch): g for stage, g in enumerate(found, start=1)})
    sums: list[list[Tensor | None]] = [[None] * len(own) for own in parameters]
    for action in executed:
        if action.kind not in (ActionKind.FULL_BACKWARD, ActionKind.WEIGHT_BACKWARD):
            continue
        mask = (masks or {}).get(action.stage, {}).get(action.microbatch)
        for i, gradient in enumerate(alone[action.stage, action.microbatch]):
            if mask is None or not mask[i]:
                before = sums[action.stage][i]
                sums[action.stage][i] = gradient if before is None else before + gradient
    return Ran(sums, losses, sent, list(executed))


def assert_equal(ran: Ran, wanted: Ran) -> None:
    """Live gradients and everything sent equal to the last bit; None exactly where expected."""
    assert all(map(torch.equal, ran.losses, wanted.losses))
    assert ran.sent.keys() == wanted.sent.keys()
    assert [key for key in ran.sent if not torch.equal(ran.sent[key], wanted.sent[key])] == []
    for stage, (got, want) in enumerate(zip(ran.gradients, wanted.gradients, strict=True)):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            where = f"parameter {i} of stage {stage}"
            assert (a is None) == (b is None), where
            assert a is None or torch.equal(a, b), where


def uniform_masks(modules: Sequence[nn.Module], frozen: bool) -> dict[int, dict[int, np.ndarray]]:
    """The same answer for every parameter of every stage and microbatch."""
    return {
        stage: {m: np.full(len(list(module.parameters())), frozen) for m in range(N_MICROBATCHES)}
        for stage, module in enumerate(modules)
    }


def random_masks(
    modules: Sequence[nn.Module], seed: int, ratio: float
) -> dict[int, dict[int, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        stage: {
            m: rng.random(len(list(module.parameters()))) < ratio for m in range(N_MICROBATCHES)
        }
        for stage, module in enumerate(modules)
    }


def shard(modules: list[nn.Module], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for module in modules:
        for child in [m for m in module.modules() if isinstance(m, (Block, nn.Linear))]:
            if not (isinstance(child, nn.Linear) and child.weight.shape[0] != VOCABULARY):
                fully_shard(child, mesh=mesh, **options)
        if not isinstance(module, Block):
            fully_shard(module, mesh=mesh, **options)


def whole(gradients: list[list[Any]]) -> list[list[Tensor | None]]:
    return [[None if g is None else g.full_tensor() for g in stage] for stage in gradients]


def modules_for(schedule: type, seed: int = 0) -> list[nn.Module]:
    """Four stages, or as many as the schedule allows on one rank."""
    modules = make_modules(seed)
    if schedule in SINGLE:
        return [nn.Sequential(*modules)]
    if schedule in V_SHAPED:
        return [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
    return modules
