"""The local part of a sharded tensor, and sums over the parts of all ranks."""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor's part on this rank, without its graph."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; from a GPU it is complete after :func:`copied`."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def copied(tensor: Tensor) -> torch.cuda.Event | None:
    """Return an event to wait for begun copies of a device, if necessary."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def whole_in_turn(tensor: Tensor, turn: int) -> Tensor | None:
    """Return a tensor, gathered on one of its ranks; None on the others.

    A collective call of the tensor's ranks; ``turn`` counts on from the first after the last.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = tensor.device_mesh
    # On the mesh's device: the processor may have the shards alone.
    whole: Tensor = tensor.detach().to(mesh.device_type).full_tensor()
    ranks = mesh.mesh.flatten().tolist()
    return whole if ranks[turn % len(ranks)] == dist.get_rank() else None


def as_sharded(vector: Tensor, parameter: Tensor) -> Tensor:
    """Return a rank's part sharded like ``parameter``; itself if not sharded."""
    if not isinstance(parameter, DTensor):
        return vector
    return DTensor.from_local(
        vector.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient, 0 if missing, of the parameter's local part."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_part(parameter))
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        # Where tensor parallelism leaves a sum over ranks open, it is done now.
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def parameters_of_graph(module: nn.Module, left_out: Collection[nn.Module]) -> list[Tensor]:
    """Return the parameters in a module's autograd graph, in the module's order.

    FSDP computes with gathered parameters, other objects than the module's shards; so they are
    looked up at each backward, and gathered first if released by the forward. Modules outside of
    the batch, ``left_out``, stay.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule) and part not in left_out:
            part.unshard()
    return list(module.parameters())


def sum_over_shards(parameters: Sequence[Tensor], columns: Tensor) -> None:
    """Add up, in place, the values of all shards of tensors.

    Columns have metrics of local parts of n tensors, shape [n, number of metrics].
    """
    rows_of_group: dict[dist.ProcessGroup, list[int]] = {}
    for i, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                # Not is_shard(): it denies the strided shards of FSDP over tensor parallelism.
                if not placement.is_replicate():
                    group = parameter.device_mesh.get_group(dim)
                    rows_of_group.setdefault(group, []).append(i)
    for group, rows in rows_of_group.items():
        part = columns[rows].contiguous()
        dist.all_reduce(part, group=group)
        columns[rows] = part
