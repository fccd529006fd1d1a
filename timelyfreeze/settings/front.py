"""Choices about a frozen front: cache, elastic pipeline, packing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from timelyfreeze.files import Fraction, OneOf, Within
from timelyfreeze.settings.names import AtLeast0, key, rule_errors

GIB = 1024**3
_Room = Annotated[float, Within(0.0)]


@dataclass(frozen=True)
class CacheSettings:
    """Whether outputs of a frozen front are read in later epochs."""

    enable: bool = False
    """Read what the frozen front puts out for a row instead of computing it again. For methods that
    freeze the front and make no plan, and data whose rows come again: see docs/front.md."""

    memory_gib: _Room = 4.0
    """Memory of the host, GiB for each process, that rows are kept in first. 0: none."""

    disk_gib: _Room = 0.0
    """Room on the disk, GiB for each host, for rows that do not fit into memory. Its processes
    share it, and find these rows again after a move or a resume. Rows that are read ahead take up
    to 1 GiB of memory more. 0: none."""

    folder: str = "activation_cache"
    """Where those rows are written, below job.dump_folder if it is not absolute. Only one run at a
    time can use a folder. What it holds may be deleted whenever no run uses it."""

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings: key, value and rule."""
        yield from rule_errors(self, "cache")
        if self.memory_gib == self.disk_gib == 0.0:
            yield (
                f"{key('cache.memory_gib')} is 0.0, and {key('cache.disk_gib')} too, so nothing "
                "can be kept; make one of them larger"
            )
        if self.disk_gib > 0.0 and not self.folder:
            yield f"{key('cache.folder')} is empty, and {key('cache.disk_gib')} is {self.disk_gib}"


@dataclass(frozen=True)
class ActivationCache:
    """The cache of a trainer of one's own; docs/library.md has the rules for its data.

    Args:
        memory_gib: Memory of the host for rows, GiB per process, filled first.
        disk_gib: Room on the disk for further rows, GiB per host, shared by its processes.
        folder: Folder of rows on the disk, for a single run at a time.
        identity: Influences on outputs of the front besides its weights and a row's tokens, as
            text: the model's settings, types of numbers. Files of another identity are not read.
        layers: Name of the ``nn.ModuleDict`` of blocks in the modules of stages.
        embedding: Name of the embedding in the first stage.
    """

    memory_gib: float = 4.0
    disk_gib: float = 0.0
    folder: str = "activation_cache"
    identity: str = ""
    layers: str = "layers"
    embedding: str = "tok_embeddings"

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings: argument, value and rule."""
        yield from CacheSettings(True, self.memory_gib, self.disk_gib, self.folder).errors()
        if self.disk_gib > 0.0 and not self.identity:
            yield (
                f"{key('cache.identity')} is empty, and {key('cache.disk_gib')} is "
                f"{self.disk_gib}; files outlive a run, so name what outputs depend on besides "
                "weights and tokens: the model's settings, types of numbers"
            )


NONE = "none"
EFFICIENCY = "efficiency"
LINEAR = "linear"


@dataclass(frozen=True)
class PackingSettings:
    """Whether batches grow, or ranks become fewer, as the front of the model freezes."""

    mode: Annotated[str, OneOf(NONE, "performance", EFFICIENCY)] = NONE
    """"performance": use memory that the frozen front sets free for larger microbatches, so that a
    step takes fewer gradient accumulations. "efficiency": once the model fits on fewer ranks, go on
    with as many processes, from a checkpoint. "none": both stay. For methods that freeze the front
    and make no plan: see docs/front.md."""

    max_global_batch: AtLeast0 = 0
    """Once a step is down to one batch, training.global_batch_size may grow up to this, in whole
    multiples. The run then takes fewer steps for the same rows. 0: it stays."""

    learning_rate: Annotated[str, OneOf(NONE, LINEAR, "sqrt")] = NONE
    """How the learning rate grows with the global batch: "none" (not at all), "linear" (as the
    batch does) or "sqrt" (as its square root)."""

    @property
    def is_on(self) -> bool:
        """Whether batches may grow, or ranks become fewer."""
        return self.mode != NONE

    @property
    def gives_back(self) -> bool:
        """Whether ranks may become fewer."""
        return self.mode == EFFICIENCY

    def rate_factor(self, growth: int) -> float:
        """Return the factor of the learning rate for steps with more rows."""
        if self.learning_rate == NONE:
            return 1.0
        return float(growth) if self.learning_rate == LINEAR else math.sqrt(growth)

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings: key, value and rule."""
        yield from rule_errors(self, "packing")
        if self.gives_back:
            for name, kept in (("max_global_batch", 0), ("learning_rate", NONE)):
                if (value := getattr(self, name)) != kept:
                    yield (
                        f"{key(f'packing.{name}')} is {value!r}; with packing.mode {EFFICIENCY!r} "
                        f"steps keep their rows, so it must be {kept!r}"
                    )


@dataclass(frozen=True)
class ElasticSettings:
    """Whether a frozen front makes the pipeline shorter, and replicas of it take the free ranks."""

    enable: bool = False
    """Move the model onto half as many pipeline ranks once enough of its front is frozen for them,
    and train replicas on the ranks that this frees. For methods that freeze the front, alone or
    with a plan, which is made again then: see docs/front.md."""

    partition: Annotated[str, OneOf("parameters", "time")] = "parameters"
    """What is even where the model is cut again: "parameters", or "time", by the profile that
    parallelism.partition_profile names."""

    frozen_cost: Fraction = 1 / 6
    """lambda, in [0, 1]: what a frozen layer counts where the model is cut by parameters, as a
    fraction of a live one."""

    sublayers: bool = False
    """Cut by parameters also between attention and MLP of a block."""

    min_ranks: Annotated[int, Within(1)] = 2
    """The pipeline becomes no shorter than this. 1: data parallelism alone in the end."""

    global_batch: Annotated[str, OneOf("constant", "paper")] = "constant"
    """Rows of a step: "constant", which replicas share, or "paper": each replica has as many as
    the pipeline of the start, and the run takes fewer steps for the same rows."""

    search_microbatches: bool = False
    """Try, while learning goes on, up to 4 numbers of microbatches from K to 6 K once for each
    length K of the pipeline, and keep the fastest. The rows of a step stay."""

    join_limit_s: float = 120.0
    """Seconds, above 0 and below comm.init_timeout_seconds, that ranks which are ready for a move
    wait for the others. Without them the run goes on as before."""

    @property
    def is_by_time(self) -> bool:
        """Whether the model is cut again by measured times."""
        return self.enable and self.partition == "time"

    @property
    def cuts_blocks(self) -> bool:
        """Whether the model is cut within blocks too."""
        return self.enable and self.sublayers

    @property
    def searches(self) -> bool:
        """Whether numbers of microbatches are tried."""
        return self.enable and self.search_microbatches

    @property
    def rows_grow(self) -> bool:
        """Whether a step has more rows where there are more replicas."""
        return self.global_batch == "paper"

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings: key, value and rule."""
        yield from rule_errors(self, "elastic")
