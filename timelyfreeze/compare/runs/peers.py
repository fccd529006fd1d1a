"""What a user would do without freezing, to be done in the time of a run with it.

A peer trains with method none, and with less work than the run of none beside it:

- ``fewer_steps``: fewer steps, the learning-rate schedule squeezed with them;
- ``fewer_microbatches``: as many steps, each over fewer microbatches.

It belongs to one freezing method, whose time it is given: ``fewer_steps_for_apf``. How much it
trains follows from that time and from the run of none (``asked``).
"""

from __future__ import annotations

FEWER_STEPS, FEWER_MICROBATCHES = "fewer_steps", "fewer_microbatches"
PEERS = (FEWER_STEPS, FEWER_MICROBATCHES)
# What a peer changes of the run of none. Values differ from seed to seed, as times do.
PEER_KEYS = frozenset({
    "training.steps", "training.local_batch_size", "training.global_batch_size",
    "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "validation.freq",
})  # fmt: skip
_FOR = "_for_"


def peer_name(peer: str, method: str) -> str:
    """Return what stands in place of a method for the ``peer`` of a freezing method."""
    return f"{peer}{_FOR}{method}"


def split_peer(name: str) -> tuple[str, str] | None:
    """Return peer and freezing method of what ``peer_name`` gives; None for any other name."""
    peer, _, method = name.partition(_FOR)
    return (peer, method) if peer in PEERS and method else None


def freezes(method: str) -> bool:
    """Return whether a run of that name freezes anything."""
    return method != "none" and split_peer(method) is None
