"""A run that is built anew, in another form, whenever what is frozen asks for it."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.tools import utils as titan_tools
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.runtime import Exchange
from torchtitan.freezing.checks import ConfigError, check
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.form import Form, Moment, Pace
from torchtitan.freezing.elastic.joining import Joining
from torchtitan.freezing.elastic.leaving import HandedOver, KnownDims, Leaving, leaving, silence
from torchtitan.freezing.elastic.packing import first_batch, packed_batch
from torchtitan.freezing.elastic.pipeline import Pipeline, first_pipeline, pipeline_for
from torchtitan.freezing.elastic.search import MicrobatchSearch
from torchtitan.freezing.report.output import RunOutput


class ElasticRun:
    """A trainer for as long as its form suits what is frozen, then another for the next.

    All processes stay. Meshes, stages and optimizers are built anew, and what a checkpoint would
    hold goes through the processes' memory. What the run writes goes on in the same folder.

    Args:
        trainer: The trainer's class.
        job_config: What the run begins with.
    """

    def __init__(self, trainer: type[Trainer], job_config: JobConfig) -> None:
        self._build = leaving(trainer)
        self._config = job_config
        self._form = _first_form(job_config)
        self._next = self._form
        self._n_frozen: int | None = None
        self._search: MicrobatchSearch | None = None
        if job_config.freezing.elastic.searches:
            self._search = MicrobatchSearch(job_config, lambda s: max(Exchange().all_gather(s)))
        self._dims: KnownDims = {}
        self._output: RunOutput | None = None
        self._trainer: Leaving | None = self._build(job_config, self._leaves, Pace(), self._dims)
        self._joining = Joining(
            _get_default_store(),  # torchrun's; torch has no public name for it
            dist.get_rank(),
            dist.get_world_size(),
            job_config.freezing.elastic.join_limit_s,
        )

    def train(self) -> None:
        """Train to the end, in as many forms as it takes.

        Raises:
            Exception: As ``FreezingTrainer.train``.
        """
        while self._trainer is not None:
            self._trainer.train()
            if self._next == self._form:
                return
            started = time.perf_counter()
            self._move(self._trainer.hand_over(), started)

    def close(self) -> None:
        """Close the trainer, or, if building one has failed, what it would have gone on with."""
        if self._trainer is not None:
            self._trainer.close()
        elif self._output is not None:
            self._output.close()

    def _leaves(self, moment: Moment) -> Form | None:
        """Return how the run goes on elsewhere, None if it stays; the same on all ranks."""
        if moment.step == 0:
            return None  # torch would hand over an optimizer that has made a step
        wanted = self._form
        if moment.n_frozen != self._n_frozen:
            self._n_frozen = moment.n_frozen
            wanted = _form_for(self._config, moment, self._form)
            if self._search is not None:
                wanted = self._search.begin(wanted)
        elif self._search is not None and moment.seconds > 0.0:
            wanted = self._search.after_step(self._form, moment.seconds)
        self._next = self._form
        if wanted != self._form:
            self._next = self._joined(self._possible(wanted))
        return None if self._next == self._form else self._next

    def _possible(self, form: Form) -> Form:
        """Return ``form``, or the present one if a run cannot have it."""
        try:
            check(form.moved(self._config))
        except ConfigError as error:
            logger.warning("The run does not go on %s: %s", form, error)
            return self._form
        return form

    def _joined(self, form: Form) -> Form:
        """Return ``form``, or the present one if a rank is not ready to leave it in time."""
        if form == self._form or not (absent := self._joining.absent()):
            return form
        if dist.get_rank() == 0:
            logger.warning(
                "The run does not go on %s, but as before: %s not ready within %g s "
                "(freezing.elastic.join_limit_s); the next change of what is frozen tries again",
                form,
                ", ".join(absent),
                self._config.freezing.elastic.join_limit_s,
            )
        return self._form

    def _move(self, handed: HandedOver, started: float) -> None:
        """Go on with a trainer of the next form, which loads what the last has handed over."""
        self._trainer, self._output = None, handed.output  # room for the next one
        gc.collect()
        if titan_tools.device_type != "cpu":
            titan_tools.device_module.empty_cache()
        moved, pace = self._next.moved(self._config), self._next.pace(self._config)
        with silence(logging.WARNING), warnings.catch_warnings():  # all was said at the start
            warnings.simplefilter("ignore")
            self._trainer = self._build(moved, self._leaves, pace, self._dims, handed.output)
        self._form = self._next
        self._trainer.take_over(handed, partial(self._tell, self._trainer, started))

    def _tell(self, trainer: Leaving, started: float) -> None:
        """Say and write down what the run has moved to, once it is there."""
        seconds, step = time.perf_counter() - started, trainer.step + 1
        trainer.device_seconds += seconds * dist.get_world_size()
        trainer.metrics_processor.note_move(step, self._n_frozen, self._form.split, seconds)
        logger.info(
            "Frozen layers: %d; the run goes on %s, from step %d, after %.1f s",
            self._n_frozen,
            self._form,
            step,
            seconds,
        )


def _first_form(config: JobConfig) -> Form:
    return first_batch(config) if config.freezing.packing.is_on else first_pipeline(config)


def _form_for(config: JobConfig, moment: Moment, present: Form) -> Form:
    if config.freezing.packing.is_on:
        return packed_batch(config, moment)
    pipeline = pipeline_for(config, moment.n_frozen) or present
    assert isinstance(pipeline, Pipeline)  # the present one is as the first
    return pipeline.ending(config, moment)
