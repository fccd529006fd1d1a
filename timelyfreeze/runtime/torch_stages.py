"""The one place that touches private names of torch's pipeline stages and of FSDP2.

Each name is asked for where it is not in every torch from 2.13 to 2.15;
``tests/timelyfreeze/runtime/test_torch_names.py`` says which torch has which.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard


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
        for group in state._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed"):
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()
