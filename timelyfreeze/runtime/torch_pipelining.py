"""The one place that touches private names of torch's schedules, of its stages and of FSDP2.

Written against torch 2.13 to 2.15. Each name is asked for where it is not in all of them;
``tests/timelyfreeze/runtime/test_torch_names.py`` says which torch has which, and fails by name
when one of them moves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from timelyfreeze.schedule import (
    Action,
    ActionKind,
    ScheduleOrder,
    build_order,
    gpipe_order,
    one_f_one_b_order,
)
from timelyfreeze.settings import key

_KINDS = {kind.value: kind for kind in ActionKind}


def read_order(schedule: Any) -> ScheduleOrder:
    """Return the order in which a torch schedule object executes compute actions, a row per rank.

    Multi-stage and CSV schedules carry their order as data, with sends, receives, shard handling,
    idle steps and overlap containers in between; those are filtered out and containers flattened.
    GPipe and 1F1B run hand-written loops beside which torch keeps an order for drawing; in 2.13 the
    one of 1F1B differs on the last rank from what the loop does, so for these two the order comes
    from our own generators, which follow the loops.
    """
    if isinstance(schedule, torch_schedules.ScheduleGPipe):
        return gpipe_order(schedule._num_stages, schedule._n_microbatches)
    if isinstance(schedule, torch_schedules.Schedule1F1B):
        return one_f_one_b_order(schedule._num_stages, schedule._n_microbatches)
    if not isinstance(schedule, torch_schedules._PipelineScheduleRuntime):
        raise ValueError(
            f"{key('schedule')} is {type(schedule).__name__}, whose order of "
            "execution is unknown; use GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, "
            "ZBVZeroBubble, DualPipeV or a CSV schedule"
        )
    order = schedule.pipeline_order_with_comms
    return build_order([list(_compute_actions(order[rank])) for rank in sorted(order)])


def named_order(
    schedule_name: str, n_ranks: int, n_microbatches: int, *, stages_per_rank: int
) -> ScheduleOrder:
    """Return the order of a schedule by its name, without processes or stages.

    The name is as in ``parallelism.pipeline_parallel_schedule``, in any case; ``stages_per_rank``
    is 1 for GPipe and 1F1B, 2 or more for the others.
    """
    schedule_class = torch_schedules.get_schedule_class(schedule_name)
    if schedule_class is torch_schedules.ScheduleGPipe:
        return gpipe_order(n_ranks, n_microbatches)
    if schedule_class is torch_schedules.Schedule1F1B:
        return one_f_one_b_order(n_ranks, n_microbatches)
    try:
        rows = get_schedule_ops(schedule_class, n_ranks, n_microbatches, stages_per_rank)
    except AssertionError as error:
        raise ValueError(f"{schedule_name}: {error}") from error
    return build_order([list(_compute_actions(row)) for row in rows])


def _compute_actions(torch_actions: Any) -> Any:
    for torch_action in _flat(torch_actions):
        if torch_action.computation_type.value in _KINDS:
            kind = _KINDS[torch_action.computation_type.value]
            yield Action(torch_action.stage_index, kind, torch_action.microbatch_index)


_IN_V = (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV)


def places_stages_in_v(schedule_name: str) -> bool:
    """Return whether the named torch schedule puts the first and the last stage on rank 0."""
    return torch_schedules.get_schedule_class(schedule_name) in _IN_V


def stages_of(schedule: Any) -> list[Any]:
    """Return the pipeline stages that a schedule object drives on this rank."""
    if isinstance(schedule, torch_schedules.PipelineScheduleSingle):
        return [schedule._stage]
    return list(schedule._stages)


def has_loss(schedule: Any) -> bool:
    """Return whether a schedule computes a loss, without which nothing is trained."""
    return schedule._loss_fn is not None


def split_batch(
    schedule: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Return what a schedule hands to its stage for each microbatch when it runs a batch."""
    return list(zip(*schedule._split_inputs(args, dict(kwargs)), strict=True))


def run_batches_in(
    schedule: Any,
    around: Callable[[], AbstractContextManager[None]],
    timed: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Have every training batch of a schedule run in ``around()``, and each loss in ``timed()``.

    Batches of ``schedule.eval`` run as before. What is returned puts everything back.
    """
    run, loss_fn = schedule._step_microbatches, schedule._loss_fn

    def run_batch(*args: Any, **kwargs: Any) -> Any:
        with around() if schedule._has_backward else nullcontext():
            return run(*args, **kwargs)

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        with timed():
            return loss_fn(*args, **kwargs)

    def undo() -> None:
        del schedule._step_microbatches
        schedule._loss_fn = loss_fn

    schedule._step_microbatches = run_batch
    if loss_fn is not None:
        schedule._loss_fn = compute_loss
    return undo


def run_in_order(schedule: Any, actions: Sequence[Action]) -> None:
    """Make a schedule that drives all stages of a pipeline run ``actions``, one after the other.

    The schedule was built in a group of one rank; each action comes after all that it needs.
    """
    order = {
        0: [
            torch_schedules._Action(
                action.stage, torch_schedules._ComputationType(action.kind.value), action.microbatch
            )
            for action in actions
        ]
    }
    schedule.pipeline_order = order
    schedule._prepare_schedule_with_comms(order)


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Take everything that belongs to the backward out of a schedule's order, for evaluation.

    torch evaluates by walking the whole order with backwards that do nothing. Where neighbouring
    stages share a rank it then hands on gradients that nobody computed, and fails. GPipe and 1F1B
    have no order as data; they leave backwards out by themselves, and are left alone.

    What remains is sent and received in the order in which it was before, on every rank, so a
    schedule that cannot hang does not begin to. FSDP's parameters are gathered before a stage's
    first forward and let go after its last.
    """
    order = getattr(schedule, "pipeline_order_with_comms", None)
    if order is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: _forward_actions(actions) for rank, actions in order.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = order


def _forward_actions(torch_actions: Any) -> list[Any]:
    kinds = torch_schedules._ComputationType
    # Since torch 2.15 each send has an action that waits for it, which must not go without it.
    names = ("FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F")
    wanted = [kinds[name] for name in names if name in kinds.__members__]
    kept = [action for action in _flat(torch_actions) if action.computation_type in wanted]
    forwards = [
        place for place, action in enumerate(kept) if action.computation_type == kinds.FORWARD
    ]
    first = {kept[place].stage_index: place for place in reversed(forwards)}
    last = {kept[place].stage_index: place for place in forwards}
    actions = []
    for place, action in enumerate(kept):
        stage = action.stage_index
        if first.get(stage) == place:
            actions.append(torch_schedules._Action(stage, kinds.UNSHARD, None))
        actions.append(action)
        if last.get(stage) == place:
            actions.append(torch_schedules._Action(stage, kinds.RESHARD, None))
    return actions


def _flat(torch_actions: Any) -> Iterator[Any]:
    """Yield actions, those of overlap containers one by one, without idle steps."""
    for torch_action in torch_actions:
        if torch_action is None:
            continue
        if torch_action.sub_actions is not None:
            yield from _flat(torch_action.sub_actions)
        else:
            yield torch_action


def keep_gradients_unreduced(module: FSDPModule) -> None:
    """Have FSDP2 add up gradients as torch's own stage does, until the schedule reduces them."""
    if not hasattr(module, "set_manual_backward_finalization"):
        module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)


def announce_reduction(module: Any) -> None:
    """Say that a schedule will reduce gradients, without which FSDP2 fails since torch 2.15."""
    if isinstance(module, FSDPModule) and hasattr(module, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def settle_unsharded_gradients(module: FSDPModule) -> None:
    """Bring FSDP2's unsharded gradients to the one place where its reduction looks for them.

    A weight pass that leaves a parameter out in one microbatch and not in another leaves its
    gradient partly in the unsharded parameter and partly in the accumulator, which FSDP2's own
    reduction asserts against. Call it between a module's last backward and the reduction. Since
    torch 2.15 there is one place, and nothing to do.
    """
    for state in fully_shard.state(module)._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()
