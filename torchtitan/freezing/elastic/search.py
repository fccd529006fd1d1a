"""PipeTransformer's search for the number of microbatches (Sec. 3.2), in a run that goes on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from torchtitan.tools.logging import logger

from torchtitan.freezing.config import JobConfig, examples_of_microbatch
from torchtitan.freezing.elastic.pipeline import Pipeline

_N_CANDIDATES = 4
_N_COUNTED = 3  # steps of a trial, besides its first


class MicrobatchSearch:
    """Tries numbers of microbatches, and keeps the fastest one of each length of a pipeline.

    All ranks ask alike. Where a move to a trial is given up, the steps of the pipeline that stays
    count as its own.

    Args:
        config: What the run began with.
        slowest: Returns the largest of the numbers that all ranks call it with.
    """

    def __init__(self, config: JobConfig, slowest: Callable[[float], float]) -> None:
        self._config, self._slowest = config, slowest
        self._found: dict[int, int] = {}  # microbatches, by ranks of a pipeline
        self._left: list[int] = []
        self._seconds: list[float] = []
        self._medians: dict[int, float] = {}

    def begin(self, pipeline: Pipeline) -> Pipeline:
        """Return a new pipeline with as many microbatches as it begins with."""
        n_ranks = len(pipeline.split)
        if n_ranks in self._found:
            return self._with(pipeline, self._found[n_ranks])
        self._left = candidates(n_ranks, self._rows(pipeline))
        self._seconds, self._medians = [], {}
        return self._with(pipeline, self._left.pop(0)) if self._left else pipeline

    def after_step(self, pipeline: Pipeline, seconds: float) -> Pipeline:
        """Return what the run goes on in, after a step of ``pipeline`` that took so long here."""
        if (n_ranks := len(pipeline.split)) in self._found:
            return pipeline
        self._seconds.append(seconds)
        if len(self._seconds) <= _N_COUNTED:
            return pipeline
        size = pipeline.microbatch or examples_of_microbatch(self._config)
        median = statistics.median(self._seconds[1:])
        self._medians[self._rows(pipeline) // size] = self._slowest(median)
        self._seconds = []
        if self._left:
            return self._with(pipeline, self._left.pop(0))
        self._found[n_ranks] = best = min(self._medians, key=self._medians.__getitem__)
        tried = ", ".join(f"{1e3 * s:,.1f} ms with {n}" for n, s in self._medians.items())
        logger.info("Microbatches of %d ranks: %d, of steps of %s", n_ranks, best, tried)
        return self._with(pipeline, best)

    def _rows(self, pipeline: Pipeline) -> int:
        return pipeline.moved(self._config).training.local_batch_size

    def _with(self, pipeline: Pipeline, n_microbatches: int) -> Pipeline:
        size = self._rows(pipeline) // n_microbatches
        is_first = size == examples_of_microbatch(self._config)
        return replace(pipeline, microbatch=None if is_first else size)


def candidates(n_ranks: int, rows: int) -> list[int]:
    """Return up to 4 numbers from K to 6 K that divide the rows of a batch, evenly taken."""
    possible = [n for n in range(n_ranks, 6 * n_ranks + 1) if rows % n == 0]
    if len(possible) <= _N_CANDIDATES:
        return possible
    last = len(possible) - 1
    return [possible[round(i * last / (_N_CANDIDATES - 1))] for i in range(_N_CANDIDATES)]
