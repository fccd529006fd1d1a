"""What the adapter makes torch's schedules do."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from tests.timelyfreeze.helpers.pretended_ranks import build
from tests.timelyfreeze.helpers.stages import (
    N_MICROBATCHES,
    Pipeline,
    assert_equal,
    expected,
    make_batch,
    make_modules,
    modules_for,
    process_group,
    random_masks,
    sum_loss,
)
from timelyfreeze.control.emulated import merge_ranks
from timelyfreeze.runtime.torch_pipelining import (
    forward_only,
    named_order,
    run_batches_in,
    run_in_order,
    split_batch,
)
from timelyfreeze.schedule.order import Action


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_torch_still_cannot_evaluate_where_neighbours_fraction_a_rank(name: str) -> None:
    """Guards ``_PipelineScheduleRuntime.eval``: it batches gradients that evaluation has not.

    When this fails, ``forward_only`` is no longer needed.
    """
    with process_group():
        modules = make_modules()
        halves = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
        pipeline = Pipeline(halves, torch_schedules.get_schedule_class(name))
        tokens, labels = make_batch()
        with torch.no_grad(), pytest.raises(AssertionError, match="doesn't have backward"):
            pipeline.schedule.eval(tokens, target=labels)


IN_PARTS = {
    "Interleaved1F1B": 4,
    "InterleavedZeroBubble": 4,
    "LoopedBFS": 4,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_forwards_alone_evaluate_under_every_schedule(name: str) -> None:
    with process_group():
        modules = make_modules()
        parts = modules
        if IN_PARTS[name] == 2:
            parts = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
        pipeline = Pipeline(parts, torch_schedules.get_schedule_class(name))
        before, order = pipeline.run(), pipeline.schedule.pipeline_order_with_comms
        for module in modules:
            module.zero_grad()
        tokens, labels = make_batch(seed=2)
        losses: list[torch.Tensor] = []
        with torch.no_grad():
            with forward_only(pipeline.schedule):
                pipeline.schedule.eval(tokens, target=labels, losses=losses)
            chain = nn.Sequential(*modules)
            expected = [
                sum_loss(chain(rows), targets)
                for rows, targets in zip(
                    tokens.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True
                )
            ]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
        assert pipeline.schedule.pipeline_order_with_comms is order
        assert all(p.grad is None for module in modules for p in module.parameters())
        after = pipeline.run()
        assert after.executed == before.executed
        torch.testing.assert_close(after.gradients, before.gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", IN_PARTS)
def test_ranks_send_forwards_in_the_order_in_which_they_are_awaited(
    name: str, size: tuple[int, int]
) -> None:
    schedule = build(name, *size)
    with forward_only(schedule):
        rows = {
            rank: [str(action) for action in actions]
            for rank, actions in schedule.pipeline_order_with_comms.items()
        }
        owner = dict(schedule.stage_index_to_group_rank)
    words = {
        rank: [re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", w) for w in row] for rank, row in rows.items()
    }
    parsed = {
        rank: [(int(m[1]), m[2], int(m[3]) if m[3] else None) for m in row if m]
        for rank, row in words.items()
    }
    assert all(len(parsed[rank]) == len(rows[rank]) for rank in rows), rows
    n_ranks, n_microbatches = size
    for left, right in itertools.permutations(range(n_ranks), 2):
        sent = [
            (s + 1, m) for s, kind, m in parsed[left] if kind == "SEND_F" and owner[s + 1] == right
        ]
        got = [(s, m) for s, kind, m in parsed[right] if kind == "RECV_F" and owner[s - 1] == left]
        assert sent == got
    waits = "WAIT_SEND_F" in torch_schedules._ComputationType.__members__  # since torch 2.15
    for row in parsed.values():
        kinds = {"F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD", *["WAIT_SEND_F"] * waits}
        assert {kind for _, kind, _ in row} <= kinds
        sends = [(s, m) for s, kind, m in row if kind == "SEND_F"]
        awaited = [(s, m) for s, kind, m in row if kind == "WAIT_SEND_F"]
        assert sorted(awaited) == (sorted(sends) if waits else [])
        for s, m in awaited:
            assert row.index((s, "SEND_F", m)) < row.index((s, "WAIT_SEND_F", m))
        for stage in {s for s, _, _ in row}:
            own = [kind for s, kind, _ in row if s == stage and kind in ("F", "UNSHARD", "RESHARD")]
            assert own == ["UNSHARD", *["F"] * n_microbatches, "RESHARD"]


def test_schedules_without_an_order_as_data_are_left_alone() -> None:
    with process_group("fake", world_size=2):
        schedule = build("1F1B", 2, 4)
    with forward_only(schedule):
        assert not hasattr(schedule, "pipeline_order_with_comms")


# Four stages over so many ranks, which all are this process.
EMULATED = {
    "GPipe": 4,
    "1F1B": 4,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def emulated(name: str, modules: list[nn.Module]) -> tuple[Pipeline, tuple[Action, ...]]:
    """A pipeline that runs the merged order of a schedule's ranks."""
    n_ranks = EMULATED[name]
    order = named_order(name, n_ranks, N_MICROBATCHES, stages_per_rank=len(modules) // n_ranks)
    pipeline = Pipeline(modules, torch_schedules.ScheduleLoopedBFS)
    actions = merge_ranks(order)
    run_in_order(pipeline.schedule, actions)
    return pipeline, actions


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", EMULATED)
def test_a_merged_order_runs_as_it_is_and_gives_exact_gradients(name: str, ratio: float) -> None:
    with process_group():
        modules = make_modules()
        pipeline, actions = emulated(name, modules)
        masks = random_masks(modules, 3, ratio)
        for _ in range(2):
            for module in modules:
                module.zero_grad()
            ran = pipeline.run(masks)
            assert tuple(ran.executed) == actions
            assert_equal(ran, expected(modules, ran.executed, masks))


@pytest.mark.parametrize("name", EMULATED)
def test_a_merged_order_evaluates(name: str) -> None:
    with process_group():
        modules = make_modules()
        pipeline, actions = emulated(name, modules)
        before = pipeline.run()
        tokens, labels = make_batch(seed=2)
        losses: list[torch.Tensor] = []
        with torch.no_grad(), forward_only(pipeline.schedule):
            pipeline.schedule.eval(tokens, target=labels, losses=losses, return_outputs=False)
        with torch.no_grad():
            chain = nn.Sequential(*modules)
            pairs = zip(tokens.chunk(N_MICROBATCHES), labels.chunk(N_MICROBATCHES), strict=True)
            assert all(map(torch.equal, losses, [sum_loss(chain(x), y) for x, y in pairs]))
        for module in modules:
            module.zero_grad()
        assert pipeline.run().executed == before.executed == list(actions)


def test_training_batches_and_their_losses_run_in_contexts_until_undone() -> None:
    events: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        events.append(f"{name} begins")
        yield
        events.append(f"{name} ends")

    def loss_fn(logits: Any, labels: Any) -> Any:
        events.append("loss")
        return sum_loss(logits, labels)

    with process_group():
        pipeline = Pipeline(
            modules_for(torch_schedules.ScheduleGPipe),
            torch_schedules.ScheduleGPipe,
            loss_fn=loss_fn,
        )
        schedule = pipeline.schedule
        undo = run_batches_in(schedule, lambda: noted("batch"), lambda: noted("loss"))
        tokens, labels = make_batch()
        schedule.step(tokens, target=labels)
        one = ["loss begins", "loss", "loss ends"]
        at_last = events[-1 - 3 * N_MICROBATCHES :]
        assert events[0] == "batch begins"
        assert at_last == [*one * N_MICROBATCHES, "batch ends"]
        events.clear()
        schedule.eval(tokens, target=labels)
        assert "batch begins" not in events
        undo()
        events.clear()
        schedule.step(tokens, target=labels)
        assert set(events) == {"loss"}


@pytest.mark.parametrize("schedule", [torch_schedules.ScheduleGPipe, torch_schedules.Schedule1F1B])
def test_a_batch_is_split_as_its_stage_gets_it(schedule: type) -> None:
    """Guards ``_split_inputs``."""
    with process_group():
        pipeline = Pipeline([nn.Sequential(*make_modules())], schedule)
        tokens, labels = make_batch()
        got: list[torch.Tensor] = []
        pipeline.modules[0].register_forward_pre_hook(lambda _, args: got.append(args[0]))
        found = split_batch(pipeline.schedule, (tokens,), {})
        assert got == []
        pipeline.schedule.step(tokens, target=labels)
        # Before a first batch torch runs a microbatch more, to see shapes.
        assert len(found) == N_MICROBATCHES
        for (args, kwargs), real in zip(found, got[-N_MICROBATCHES:], strict=True):
            assert torch.equal(args[0], real)
            assert kwargs == {}
        assert split_batch(pipeline.schedule, (), {}) == [((), {})] * N_MICROBATCHES
