"""How much a cache of activations was used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CacheUse:
    """Counts since the run began or was resumed."""

    batches: int  # batches with a frozen front
    entered: int  # those of them that began behind it
    memory_bytes: int  # rows in memory, now
    disk_bytes: int  # rows on the disk, now
    spent_ms: float  # what reading, copying and digests of weights took of the training's time
    # what the batches that began behind the front were shorter by, estimated from measured times;
    # None before any could be compared
    saved_ms: float | None
    read_ahead: int = 0  # rows of the disk that were in memory when they were needed


def use_of_all(ranks: Sequence[CacheUse]) -> CacheUse:
    """Put together what the processes of a pipeline tell; all begin the same batches."""
    saved_ms = [rank.saved_ms for rank in ranks if rank.saved_ms is not None]
    return CacheUse(
        batches=max(rank.batches for rank in ranks),
        entered=max(rank.entered for rank in ranks),
        memory_bytes=sum(rank.memory_bytes for rank in ranks),
        disk_bytes=sum(rank.disk_bytes for rank in ranks),
        spent_ms=sum(rank.spent_ms for rank in ranks),
        saved_ms=max(saved_ms, default=None),
        read_ahead=sum(rank.read_ahead for rank in ranks),
    )


def use_of_parts(former: CacheUse | None, latest: CacheUse | None) -> CacheUse | None:
    """Put together what two parts of a run tell, one after the other; kept is what is kept now."""
    if former is None or latest is None:
        return former or latest
    saved_ms = [part.saved_ms for part in (former, latest) if part.saved_ms is not None]
    return replace(
        latest,
        batches=former.batches + latest.batches,
        entered=former.entered + latest.entered,
        spent_ms=former.spent_ms + latest.spent_ms,
        saved_ms=sum(saved_ms) if saved_ms else None,
        read_ahead=former.read_ahead + latest.read_ahead,
    )
