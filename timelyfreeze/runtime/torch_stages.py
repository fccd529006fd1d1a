"""The one place that touches private names of torch's pipeline stages and of FSDP2.

Each name is asked for where it is not in every torch from 2.11 to 2.15;
``tests/timelyfreeze/runtime/test_torch_names.py`` says which torch has which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard


def greet_other_ranks_alone(stages: Iterable[Any]) -> None:
    """Keep new stages from sending a first message to their own rank, which gloo refuses.

    Before the first batch torch 2.11 lets every stage exchange a number with its neighbours, also
    where these are on the same rank. torch 2.13 leaves that out, and 2.15 has no such messages.
    """
    for stage in stages:
        if hasattr(stage, "_get_init_p2p_neighbors_ops"):
            stage._get_init_p2p_neighbors_ops = partial(
                _to_others, stage._get_init_p2p_neighbors_ops
            )


def _to_others(greetings: Callable[[], list[dist.P2POp]]) -> list[dist.P2POp]:
    return [greeting for greeting in greetings() if greeting.peer != dist.get_rank()]


def keep_gradients_unreduced(module: FSDPModule) -> None:
    """Have FSDP2 add up gradients as torch's own stage does, until the schedule reduces them."""
    if not hasattr(module, "set_manual_backward_finalization"):
        module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)


def announce_reduction(module: Any) -> None:
    """Say that the schedule will reduce a module's gradients, where no forward of it says so.

    Since torch 2.15 the reduction of FSDP2 fails otherwise.
    """
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
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.13
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for fsdp_param in (fsdp_param for group in groups for fsdp_param in group.fsdp_params):
            if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):
                fsdp_param.accumulate_unsharded_grad_if_needed()
                fsdp_param.to_accumulated_grad_if_needed()
