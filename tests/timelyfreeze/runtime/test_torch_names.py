"""Each name that the adapters need of torch, and in which torch it is.

Where one has moved, its test fails with the name, and ``torch_pipelining.py`` or
the stage has to follow. A torch of which nothing is known yet is taken to be as the newest.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.stage as torch_stage
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import PipelineStage, _schedule_visualizer
from torch.distributed.pipelining import schedules as torch_schedules

from tests.timelyfreeze.helpers.pretended_ranks import build
from tests.timelyfreeze.helpers.stages import (
    Block,
    Pipeline,
    make_modules,
    process_group,
    shard,
)
from timelyfreeze.schedule.order import ActionKind

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
ALWAYS, NEVER = (0, 0), (99, 0)


def stage() -> Any:
    return PipelineStage(nn.Linear(1, 1), 1, 4, torch.device("cpu"))


def single() -> Any:
    return build("GPipe", 2, 4)


def multi() -> Any:
    return build("Interleaved1F1B", 2, 4)


# Where a name is looked for: (of what, how one has it, name, first torch with it, first without).
NAMES: list[tuple[Callable[[], Any], str, tuple[int, int], tuple[int, int]]] = [
    *(
        (lambda: torch_schedules, name, ALWAYS, NEVER)
        for name in ("_PipelineScheduleRuntime", "_Action", "_ComputationType")
    ),
    (lambda: _schedule_visualizer, "get_schedule_ops", ALWAYS, NEVER),
    *(
        (lambda: torch_schedules._ComputationType, name, ALWAYS, NEVER)
        for name in ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    ),
    (lambda: torch_schedules._ComputationType, "WAIT_SEND_F", (2, 15), NEVER),
    *(
        (lambda: torch_schedules._Action, name, ALWAYS, NEVER)
        for name in ("stage_index", "computation_type", "microbatch_index", "sub_actions")
    ),
    *(
        (make, name, ALWAYS, NEVER)
        for make in (single, multi)
        for name in (
            "_n_microbatches", "_num_stages", "_loss_fn", "_has_backward", "_split_inputs",
            "_step_microbatches",
        )
    ),
    (single, "_stage", ALWAYS, NEVER),
    *(
        (multi, name, ALWAYS, NEVER)
        for name in (
            "_stages", "pipeline_order", "pipeline_order_with_comms",
            "_prepare_schedule_with_comms",
        )
    ),
    *(
        (stage, name, ALWAYS, NEVER)
        for name in (
            "args_recv_info", "bwd_cache", "has_backward", "is_first", "is_last", "submod",
            "get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops",
            "set_local_fwd_input", "set_local_bwd_input", "forward_maybe_with_nosync",
            "perform_reduce_grad",
        )
    ),
    # It calls these in place of perform_reduce_grad, where nothing is left to do for us.
    (stage, "start_gradient_reduction", (2, 15), NEVER),
    *(
        (lambda: FSDPModule, name, ALWAYS, NEVER)
        for name in (
            "set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync",
        )
    ),
    (lambda: FSDPModule, "set_manual_backward_finalization", (2, 15), NEVER),
    *(
        (lambda: FSDPParam, name, ALWAYS, (2, 15))
        for name in ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "first", "end"), NAMES, ids=[f"{n}-{f}" for _, n, f, _ in NAMES]
)
def test_a_name_is_where_it_is_looked_for(
    owner: Callable[[], Any], name: str, first: tuple[int, int], end: tuple[int, int]
) -> None:
    with process_group("fake", world_size=2):
        found = hasattr(owner(), name)
    should = first <= VERSION < end
    assert found is should, f"torch {torch.__version__}: {name} {'has moved' if should else 'is'}"


def test_kinds_of_actions_have_the_letters_that_ours_have() -> None:
    letters = {kind.value for kind in torch_schedules._ComputationType}
    assert {kind.value for kind in ActionKind} <= letters


@pytest.mark.parametrize(
    ("name", "parameters"),
    {
        "forward_one_chunk": ["fwd_chunk_id", "args", "kwargs", "save_forward_output"],
        "backward_one_chunk": ["bwd_chunk_id", "loss", "full_backward", "last_backward"],
        "backward_weight_one_chunk": ["bwd_chunk_id", "last_backward"],
        "backward_maybe_with_nosync": ["backward_type", "bwd_kwargs", "last_backward"],
        "forward_maybe_with_nosync": ["args", "kwargs"],
        "perform_reduce_grad": ["grad_scale_factor"],
        "get_fwd_recv_ops": ["fwd_chunk_id"],
        "get_fwd_send_ops": ["fwd_chunk_id"],
        "get_bwd_recv_ops": ["bwd_chunk_id"],
        "get_bwd_send_ops": ["bwd_chunk_id"],
        "set_local_fwd_input": ["prev_stage_outputs", "mb_index"],
        "set_local_bwd_input": ["next_stage_bwd_outputs", "mb_index"],
    }.items(),
)
def test_methods_the_stage_overrides_still_take_what_it_passes_on(
    name: str, parameters: list[str]
) -> None:
    method = getattr(PipelineStage, name, None)
    assert method is not None, f"torch {torch.__version__}: PipelineStage.{name} has moved"
    assert list(inspect.signature(method).parameters) == ["self", *parameters]


def test_the_backward_of_a_stage_gets_what_a_masked_one_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the keys of ``bwd_kwargs``, and of the groups of a split backward's weight half."""
    seen: dict[str, set[str]] = {}
    original = torch_stage.PipelineStage.backward_maybe_with_nosync

    def noting(self: Any, kind: str, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen.setdefault(kind, set()).update(given)
        for group in given.get("param_groups", ()):
            assert "params" in group
        return original(self, kind, given, *args, **kwargs)

    with process_group():
        pipeline = Pipeline(make_modules(), torch_schedules.ScheduleInterleavedZeroBubble)
        monkeypatch.setattr(torch_stage.PipelineStage, "backward_maybe_with_nosync", noting)
        pipeline.run()
    assert seen["full"] >= {"stage_output", "output_grads", "input_values"}
    assert seen["input"] >= {"stage_output", "output_grads", "input_values"}
    assert "param_groups" in seen["weight"]


def test_the_state_of_a_sharded_module_has_the_parameters_of_its_groups() -> None:
    """Guards the way to ``FSDPParam``."""
    with process_group():
        module = Block()
        shard([module])
        states = fully_shard.state(module)._state_ctx.all_states
        assert all(hasattr(state, "_fsdp_param_groups") for state in states)


def test_a_received_message_tells_its_shape_after_a_batch() -> None:
    """Guards ``args_recv_info``, which a front that runs ahead reads."""
    with process_group():
        pipeline = Pipeline(make_modules(), torch_schedules.ScheduleInterleaved1F1B)
        pipeline.run()
        (received,) = pipeline.stages[1].args_recv_info[0]
    known = received.tensor_meta
    assert (tuple(known.shape), known.dtype) == ((2, 3, 5), torch.float32)
