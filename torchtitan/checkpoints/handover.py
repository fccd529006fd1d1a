"""A checkpoint in memory, for a pipeline going on with other ranks."""

import io
from collections import ChainMap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class MemoryCheckpoint(StorageWriter, StorageReader):
    """Saved state of this process, and access to that of others.

    All processes save together and then read together, in as many process groups as they like.
    Tensors travel on ``device``, known to the default process group.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[MetadataIndex, Tensor] = {}
        self._bytes: dict[MetadataIndex, bytes] = {}
        # Of what all processes have saved, as ``save`` returns it on each.
        self.metadata: Metadata | None = None

    # -- what torch asks of both -------------------------------------------------------------------

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Prepare nothing: the only checkpoint has no path."""

    set_up_storage_writer = set_up_storage_reader = reset

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether a place suits: none does."""
        return False

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan or plans unchanged."""
        return plan

    prepare_global_plan = prepare_local_plan

    # -- saving ------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this process's part of the plan to the host."""
        written = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                kept = self._bytes[item.index] = data.getvalue()
                size = len(kept)
            else:
                copied = data.detach().to("cpu", copy=True)
                self._tensors[item.index] = copied
                size = copied.nbytes
            written.append(WriteResult(item.index, size, dist.get_rank()))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the holders of parts; torch hands the metadata to everybody."""
        metadata.storage_data = {one.index: one.storage_data for each in results for one in each}

    # -- reading -----------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all processes."""
        assert self.metadata is not None, "nothing was saved"
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Send and receive parts as planned; a collective call of all processes."""
        wanted: list[list[ReadItem]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(wanted, plan.items)
        # What is no tensor is small, so that everyone gets all of it.
        everyone: list[dict[MetadataIndex, bytes]] = [{} for _ in wanted]
        dist.all_gather_object(everyone, self._bytes)
        saved = ChainMap(*everyone)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(saved[item.storage_index]))
        # Everyone goes through all tensors in the same order, so that nobody waits for ever.
        for reader, items in enumerate(wanted):
            for item in items:
                if item.type != LoadItemType.BYTE_IO:
                    self._pass_on(item, reader, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pass_on(self, item: ReadItem, reader: int, planner: LoadPlanner) -> None:
        """Move a part from its holder to its reader, on both processes."""
        rank, holder = dist.get_rank(), self.read_metadata().storage_data[item.storage_index]
        part = None
        if rank == holder:
            part = self._tensors[item.storage_index]
            places = zip(item.storage_offsets, item.lengths, strict=True)
            part = part[tuple(slice(start, start + n) for start, n in places)]
            if rank != reader:
                dist.send(part.to(self._device).contiguous(), reader)
        if rank != reader:
            return
        if part is None:
            saved = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
            dtype = saved.properties.dtype
            part = torch.empty(item.lengths, dtype=dtype, device=self._device)
            dist.recv(part, holder)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
