"""What a user chooses about pipelines that shrink as the front of the model freezes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.settings.names import key

_PARTITIONS = ("parameters", "time")
_GLOBAL_BATCHES = ("constant", "paper")


@dataclass(frozen=True)
class ElasticSettings:
    """Whether a frozen front makes the pipeline shorter, and replicas of it take the free ranks."""

    enable: bool = False
    """Move the model onto half as many pipeline ranks once enough of its front is frozen for them,
    and train replicas on the ranks that this frees. For methods that freeze the front, alone or
    with a plan, which is made anew then: see docs/how/elastic.md."""

    partition: str = "parameters"
    """What is even where the model is cut anew: "parameters", or "time", by the profile that
    parallelism.partition_profile names."""

    frozen_cost: float = 1 / 6
    """lambda, in [0, 1]: what a frozen layer counts where the model is cut by parameters, as a
    fraction of a live one."""

    min_ranks: int = 2
    """The pipeline becomes no shorter than this, 2 at least."""

    global_batch: str = "constant"
    """Rows of a step: "constant", which replicas share, or "paper": each replica has as many as
    the pipeline of the start, and the run takes fewer steps for the same rows."""

    search_microbatches: bool = False
    """Try, while learning goes on, up to 4 numbers of microbatches from K to 6 K once for each
    length K of the pipeline, and keep the fastest. The rows of a step stay."""

    join_limit_s: float = 120.0
    """Seconds, above 0 and below comm.init_timeout_seconds, that ranks which are ready for a move
    wait for the others; without them the run goes on as before."""

    @property
    def is_by_time(self) -> bool:
        """Whether the model is cut anew by measured times."""
        return self.enable and self.partition == "time"

    @property
    def searches(self) -> bool:
        """Whether numbers of microbatches are tried."""
        return self.enable and self.search_microbatches

    @property
    def rows_grow(self) -> bool:
        """Whether a step has more rows where there are more replicas."""
        return self.global_batch == "paper"

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        if self.partition not in _PARTITIONS:
            yield (
                f"{key('elastic.partition')} is {self.partition!r}; known: {', '.join(_PARTITIONS)}"
            )
        if self.global_batch not in _GLOBAL_BATCHES:
            yield (
                f"{key('elastic.global_batch')} is {self.global_batch!r}; "
                f"known: {', '.join(_GLOBAL_BATCHES)}"
            )
        if not (math.isfinite(self.frozen_cost) and 0.0 <= self.frozen_cost <= 1.0):
            yield f"{key('elastic.frozen_cost')} is {self.frozen_cost}; it must be in [0, 1]"
        if self.min_ranks < 2:
            yield f"{key('elastic.min_ranks')} is {self.min_ranks}; it must be 2 or more"
