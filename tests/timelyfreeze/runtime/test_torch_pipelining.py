"""Orders read from torch's schedule objects, without running them."""

import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

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
from timelyfreeze.emulation.turns import merge_ranks
from timelyfreeze.runtime import torch_pipelining
from timelyfreeze.runtime.torch_pipelining import (
    forward_only,
    greet_other_ranks_alone,
    known_schedules,
    named_order,
    places_stages_in_v,
    read_order,
    run_batches_in,
    run_in_order,
    splits_backward,
    stages_of,
    stages_per_rank,
)
from timelyfreeze.schedule.actions import Action, ActionKind
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ScheduleError, build_order, order_to_csv
from timelyfreeze.schedule.schedules import one_f_one_b_order

NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "LoopedBFS",
)
SIZES = list(itertools.product((2, 4), (8, 16)))


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}ranks{size[1]}microbatches")
def size(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(ranks, microbatches), with a process group of so many pretended ranks."""
    with process_group("fake", world_size=request.param[0]):
        yield request.param


def build(name: str, n_ranks: int, n_microbatches: int) -> Any:
    """The schedule as rank 0 would make it."""
    per_rank = stages_per_rank(name)
    assert per_rank is not None
    n_stages = per_rank * n_ranks
    mine = [0, n_stages - 1] if places_stages_in_v(name) else range(0, n_stages, n_ranks)
    stages = [PipelineStage(nn.Linear(1, 1), s, n_stages, torch.device("cpu")) for s in mine]
    schedule_class = torch_schedules.get_schedule_class(name)
    return schedule_class(stages if per_rank > 1 else stages[0], n_microbatches, scale_grads=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_a_complete_order_that_cannot_hang(
    name: str, size: tuple[int, int]
) -> None:
    n_ranks, n_microbatches = size
    schedule = build(name, *size)
    order = read_order(schedule)
    dag = build_dag(order)
    n_stages = schedule._num_stages
    kinds = [action.kind for action in dag.actions]
    n_pairs = n_stages * n_microbatches
    n_full = kinds.count(ActionKind.FULL_BACKWARD)
    assert (order.n_ranks, order.n_stages, order.n_microbatches) == (
        n_ranks,
        n_stages,
        n_microbatches,
    )
    assert kinds.count(ActionKind.FORWARD) == n_pairs
    assert kinds.count(ActionKind.INPUT_BACKWARD) == n_pairs - n_full
    assert kinds.count(ActionKind.WEIGHT_BACKWARD) == n_pairs - n_full
    assert (n_full < n_pairs) == splits_backward(name)
    assert order.stage_to_rank[n_stages - 1] == (0 if places_stages_in_v(name) else n_ranks - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_tells_the_order_that_the_schedule_object_has(
    name: str, size: tuple[int, int]
) -> None:
    per_rank = stages_per_rank(name)
    assert per_rank is not None
    n_ranks, n_microbatches = size
    found = named_order(name.lower(), n_ranks, n_microbatches, stages_per_rank=per_rank)
    assert found == read_order(build(name, *size))


def test_a_schedule_that_does_not_take_the_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="Interleaved1F1B: Expected num_stages_per_rank >= 2"):
        named_order("Interleaved1F1B", 2, 8, stages_per_rank=1)
    with pytest.raises(ValueError, match="number of microbatches is 2"):
        named_order("1F1B", 4, 2, stages_per_rank=1)


# The stage and the letter of the compute actions of torch's own text.
COMPUTE = re.compile(r"\d+(F|B|I|W|BACKWARD_INPUT|BACKWARD_WEIGHT|FULL_BACKWARD)\d+")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("GPipe", "1F1B")])
def test_the_order_is_the_text_that_torch_prints_of_its_own(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    schedule = build(name, *size)
    schedule._dump_csv(str(tmp_path / "with_comms.csv"))
    text = (tmp_path / "with_comms.csv").read_text()
    # An overlap prints as (0F1;3B0)OVERLAP_F_B.
    rows = [
        [word for word in re.split(r"[,;()\"\s]+", line) if COMPUTE.fullmatch(word)]
        for line in text.splitlines()
    ]
    assert [list(map(str, row)) for row in read_order(schedule).ranks] == rows


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "1F1B"])
def test_a_csv_schedule_gives_the_order_it_was_written_from(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    order = read_order(build(name, *size))
    path = tmp_path / "schedule.csv"
    path.write_text(order_to_csv(order))
    n_stages = order.n_stages
    stages = [
        PipelineStage(nn.Linear(1, 1), s, n_stages, torch.device("cpu"))
        for s in range(n_stages)
        if order.stage_to_rank[s] == 0
    ]
    loaded = torch_schedules._PipelineScheduleRuntime(stages, size[1], scale_grads=False)
    loaded._load_csv(str(path))
    assert read_order(loaded) == order


def declared_one_f_one_b(n_ranks: int, n_microbatches: int) -> list[list[Action]]:
    """What torch says that its 1F1B runs."""
    stated = build("1F1B", n_ranks, n_microbatches)._get_pipeline_order()
    return [list(torch_pipelining._compute_actions(stated[rank])) for rank in sorted(stated)]


def test_torchs_own_text_of_1f1b_is_still_wrong(size: tuple[int, int]) -> None:
    """Guards torch's ``Schedule1F1B._get_pipeline_order``, which shifts the last rank.

    The loop of 1F1B runs 3F0 3B0 3F1 3B1 on the last of four ranks; the text says so on every
    rank but in another place. When this fails, the generator for 1F1B may give way to the text.
    """
    declared = declared_one_f_one_b(*size)
    try:
        order = build_order(declared)
    except ScheduleError:
        return
    if order == one_f_one_b_order(*size):
        pytest.skip(f"torch {torch.__version__} states the order of 1F1B as it runs it")
    assert order.ranks[-1] != one_f_one_b_order(*size).ranks[-1]


def test_the_loops_of_gpipe_and_1f1b_run_what_the_generators_say() -> None:
    """With one stage the loops can run here; several ranks are compared in tests/multiprocess."""
    with process_group():
        for schedule_class in (torch_schedules.ScheduleGPipe, torch_schedules.Schedule1F1B):
            module = nn.Sequential(*make_modules())
            pipeline = Pipeline([module], schedule_class)
            ran = pipeline.run()
            assert tuple(ran.executed) == read_order(pipeline.schedule).ranks[0]


@pytest.mark.parametrize(
    ("name", "n_modules"),
    [
        ("Interleaved1F1B", 4),
        ("InterleavedZeroBubble", 4),
        ("LoopedBFS", 4),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_what_runs_is_what_was_read(name: str, n_modules: int) -> None:
    with process_group():
        modules = make_modules()
        if n_modules == 2:
            modules = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
        pipeline = Pipeline(modules, torch_schedules.get_schedule_class(name))
        order = read_order(pipeline.schedule)
        assert tuple(pipeline.run().executed) == order.ranks[0]
        assert stages_of(pipeline.schedule) == pipeline.stages


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
    for row in parsed.values():
        assert {kind for _, kind, _ in row} <= {"F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
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


def test_stages_greet_their_neighbours_on_other_ranks_alone() -> None:
    """Rank 1 of 2 in a V of four stages holds 1 and 2: they greet 0 and 3, and not each other."""
    with process_group("fake", world_size=2, rank=1):
        stages = [PipelineStage(nn.Linear(2, 2), i, 4, torch.device("cpu")) for i in (1, 2)]
        for stage in stages:
            stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
        peers = [{op.peer for op in stage._get_init_p2p_neighbors_ops()} for stage in stages]
        assert peers == [{0, 1}, {0, 1}]
        greet_other_ranks_alone(stages)
        peers = [{op.peer for op in stage._get_init_p2p_neighbors_ops()} for stage in stages]
        assert peers == [{0}, {0}]


def test_a_schedule_without_all_the_stages_cannot_run_a_merged_order() -> None:
    actions = merge_ranks(one_f_one_b_order(4, 4))
    with process_group():
        modules = make_modules()
        halves = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])]
        pipeline = Pipeline(halves, torch_schedules.ScheduleLoopedBFS)
        with pytest.raises(
            ValueError, match=r"drives stages \[0, 1\] here and cannot run .* stages "
        ):
            run_in_order(pipeline.schedule, actions)
        single = Pipeline([nn.Sequential(*modules)], torch_schedules.ScheduleGPipe)
        with pytest.raises(ValueError, match=r"ScheduleGPipe .* must be a multi-stage schedule"):
            run_in_order(single.schedule, merge_ranks(one_f_one_b_order(1, 4)))


def test_another_object_is_no_schedule() -> None:
    with pytest.raises(
        ValueError,
        match=r"^schedule is str, whose order of execution is "
        "unknown; use GPipe, 1F1B, Interleaved1F1B",
    ):
        read_order("1F1B")


def test_known_schedules_are_those_that_torch_can_build() -> None:
    for name in known_schedules():
        assert inspect.isclass(torch_schedules.get_schedule_class(name.lower()))
    with pytest.raises(ValueError, match="Unknown schedule name") as error:
        torch_schedules.get_schedule_class("no such schedule")
    listed = re.search(r"\[(.*)\]", str(error.value))
    assert listed is not None
    assert set(re.findall(r"'(\w+)'", listed[1])) == set(known_schedules())


def test_stages_per_rank_are_upstreams() -> None:
    single = torch_schedules.PipelineScheduleSingle
    for name in known_schedules():
        is_single = issubclass(torch_schedules.get_schedule_class(name), single)
        assert stages_per_rank(name) == stages_per_rank(name.upper()) == (1 if is_single else 2)
    assert stages_per_rank("Interleaved") is None


def test_private_names_the_adapter_needs_are_where_it_looks_for_them() -> None:
    """Fails with the name that moved, so that only ``torch_pipelining.py`` has to follow."""
    version = torch.__version__
    for name in ("_PipelineScheduleRuntime", "_Action", "_ComputationType"):
        assert hasattr(torch_schedules, name), f"torch {version}: schedules.{name} has moved"
    letters = {kind.value for kind in torch_schedules._ComputationType}
    for kind in ActionKind:
        assert kind.value in letters, f"torch {version}: no computation type {kind.value!r}"
    fields = torch_schedules._Action._fields
    for name in ("stage_index", "computation_type", "microbatch_index", "sub_actions"):
        assert name in fields, f"torch {version}: _Action.{name} has moved"
    with process_group("fake", world_size=2):
        single, multi = build("GPipe", 2, 4), build("Interleaved1F1B", 2, 4)
    for schedule, names in (
        (single, ("_stage", "_num_stages", "_n_microbatches")),
        (multi, ("_stages", "pipeline_order_with_comms", "_prepare_schedule_with_comms")),
    ):
        for name in names:
            where = f"{type(schedule).__name__}.{name}"
            assert hasattr(schedule, name), f"torch {version}: {where} has moved"


def test_methods_the_stage_overrides_still_take_what_it_passes_on() -> None:
    wanted = {
        "forward_one_chunk": ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"],
        "backward_one_chunk": ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"],
        "backward_weight_one_chunk": ["self", "bwd_chunk_id", "last_backward"],
        "backward_maybe_with_nosync": ["self", "backward_type", "bwd_kwargs", "last_backward"],
    }
    for name, parameters in wanted.items():
        method = getattr(PipelineStage, name, None)
        assert method is not None, f"torch {torch.__version__}: PipelineStage.{name} has moved"
        assert list(inspect.signature(method).parameters) == parameters, name


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
