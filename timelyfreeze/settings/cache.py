"""What a user chooses about the cache of what a frozen front puts out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.settings.names import key

GIB = 1024**3


@dataclass(frozen=True)
class CacheSettings:
    """Whether what the frozen front puts out for a row is read in later epochs."""

    enable: bool = False
    """Read what the frozen front puts out for a row instead of computing it again. For methods that
    freeze the front and make no plan, and data whose rows come again: see docs/how/cache.md."""

    memory_gib: float = 4.0
    """Memory of the host, GiB for each process, that rows are kept in first. 0: none."""

    disk_gib: float = 0.0
    """Room on the disk, GiB for each host, for rows that do not fit into memory. Its processes
    share it, and find these rows again after a move or a resume. Rows that are read ahead take up
    to 1 GiB of memory more. 0: none."""

    folder: str = "activation_cache"
    """Where those rows are written, below job.dump_folder if it is not absolute. Only one run at a
    time can use a folder. What it holds may be deleted whenever no run uses it."""

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        rooms = {"cache.memory_gib": self.memory_gib, "cache.disk_gib": self.disk_gib}
        for name, room in rooms.items():
            if not (math.isfinite(room) and room >= 0.0):
                yield f"{key(name)} is {room}; it must be 0 or more, and finite"
        if self.memory_gib == self.disk_gib == 0.0:
            yield (
                f"{key('cache.memory_gib')} is 0.0, and {key('cache.disk_gib')} too, so nothing "
                "can be kept; make one of them larger"
            )
        if self.disk_gib > 0.0 and not self.folder:
            yield f"{key('cache.folder')} is empty, and {key('cache.disk_gib')} is {self.disk_gib}"


@dataclass(frozen=True)
class ActivationCache:
    """The cache of a trainer of one's own; see docs/library.md for what its data has to keep to.

    Args:
        memory_gib: Memory of the host, GiB for each process, that rows are kept in first.
        disk_gib: Room on the disk, GiB for each host, for rows that do not fit into memory; its
            processes share it.
        folder: Where those are written. Only one run at a time can use a folder.
        identity: What outputs of the front depend on besides its weights and a row's tokens, as
            text: the model's settings, types of numbers. Files of another identity are not read.
        layers: What the modules of the stages call the ``nn.ModuleDict`` of their blocks.
        embedding: What that of the first stage calls its embedding.
    """

    memory_gib: float = 4.0
    disk_gib: float = 0.0
    folder: str = "activation_cache"
    identity: str = ""
    layers: str = "layers"
    embedding: str = "tok_embeddings"

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: argument, value and rule."""
        yield from CacheSettings(True, self.memory_gib, self.disk_gib, self.folder).errors()
        if self.disk_gib > 0.0 and not self.identity:
            yield (
                f"{key('cache.identity')} is empty, and {key('cache.disk_gib')} is "
                f"{self.disk_gib}; files outlive a run, so name what outputs depend on besides "
                "weights and tokens: the model's settings, types of numbers"
            )
