"""A run that is built anew, on other pipeline ranks, whenever what is frozen asks for it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.tools import utils as titan_tools
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.control import FreezeController
from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.leaving import KnownDims, Leaving, leaving
from torchtitan.freezing.elastic.pipeline import (
    Pipeline,
    first_pipeline,
    moved_config,
    pipeline_for,
)


class ElasticRun:
    """A trainer for as long as its pipeline suits what is frozen, then another for the next.

    All processes stay. Meshes, stages and optimizers are built anew, and what a checkpoint would
    hold goes through the processes' memory.

    Args:
        trainer: The trainer's class.
        job_config: What the run begins with.
    """

    def __init__(self, trainer: type[Trainer], job_config: JobConfig) -> None:
        self._build = leaving(trainer)
        self._config = job_config
        self._pipeline = first_pipeline(job_config)
        self._next = self._pipeline
        self._n_frozen = 0
        self._dims: KnownDims = {}
        self._trainer: Leaving | None = self._build(job_config, self._leaves, self._dims)

    def train(self) -> None:
        """Train to the end, in as many pipelines as it takes.

        Raises:
            Exception: As ``FreezingTrainer.train``.
        """
        while self._trainer is not None:
            self._trainer.train()
            if self._next == self._pipeline:
                return
            self._move(*self._trainer.hand_over())

    def close(self) -> None:
        """Close the trainer that there is, if building it did not fail."""
        if self._trainer is not None:
            self._trainer.close()

    def _leaves(self, controller: FreezeController) -> bool:
        """Return whether the run goes on in another pipeline; the same on all ranks."""
        checks = controller.checks
        n_frozen = 0 if checks is None else checks.frozen_layers
        if n_frozen != self._n_frozen:
            self._n_frozen = n_frozen
            self._next = self._possible(pipeline_for(self._config, n_frozen))
        return self._next != self._pipeline

    def _possible(self, pipeline: Pipeline | None) -> Pipeline:
        """Return ``pipeline``, or the present one if there is none or a run cannot have it."""
        if pipeline is None:
            return self._pipeline
        try:
            check(moved_config(self._config, pipeline))
        except ConfigError as error:
            logger.warning("The pipeline does not become one %s: %s", pipeline, error)
            return self._pipeline
        return pipeline

    def _move(self, memory: MemoryCheckpoint, heard: int) -> None:
        """Go on with a trainer of the next pipeline, which loads what the last has handed over."""
        started = time.perf_counter()
        self._trainer = None  # room for the next one before it is built
        gc.collect()
        if titan_tools.device_type != "cpu":
            titan_tools.device_module.empty_cache()
        with _silence():  # all was said when the run began
            config = moved_config(self._config, self._next)
            self._trainer = self._build(config, self._leaves, self._dims)
        self._trainer.take_over(memory, heard)
        self._pipeline = self._next
        logger.info(
            "%d layers are frozen: the run goes on in a pipeline %s, built in %.1f s",
            self._n_frozen,
            self._pipeline,
            time.perf_counter() - started,
        )


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
