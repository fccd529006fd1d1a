"""Freezing's additions to a built trainer: clocks on its stages, and a controller."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from timelyfreeze.control import (
    EmulatedRecorder,
    EmulatedState,
    FreezeController,
    FreezingState,
    attach_clocks,
    build_controller,
)
from timelyfreeze.front.caching import ActivationStore, folder_for
from timelyfreeze.policies import FreezePolicy, parse_method
from timelyfreeze.policies.egeria import Egeria
from timelyfreeze.runtime import (
    ActionRecorder,
    OutsideClock,
    adopt_stages,
    clock_for,
    read_order,
    stages_of,
)
from timelyfreeze.settings import GIB, FreezeSettings
from torchtitan.freezing.emulation.record import EmulationRecord, OptimizerClock
from torchtitan.freezing.partition.cut import model_sizes
from torchtitan.freezing.values.freezing import caches, freeze_settings
from torchtitan.settings import cache_folder, model_family, pipeline_order

if TYPE_CHECKING:
    from torchtitan.freezing.trainer import FreezingTrainer


class Assembly:
    """A trainer's parts for freezing; ranks share ``n_processors``, None for one each."""

    def __init__(self, trainer: "FreezingTrainer", n_processors: float | None) -> None:
        self._trainer, self._config = trainer, trainer.job_config
        self._emulates = self._config.emulation.enable
        # With several threads processor time says little about how long an action takes.
        lone = self._emulates and torch.get_num_threads() == 1
        self._clock = clock_for(trainer.device, shared=n_processors is not None, lone=lone)
        self._n_processors = n_processors
        self._optimizers: OptimizerClock | None = None
        if self._emulates:
            # That of the ranks, of which an emulation runs a merged one.
            self._order = pipeline_order(self._config, trainer.model_args.n_layers)
            held = zip(trainer.model_parts, self._order.stage_to_rank, strict=True)
            ranks = {id(part): rank for part, rank in held}
            # A stage that learns nothing has no optimizer.
            self._optimizers = OptimizerClock(
                trainer.optimizers.optimizers,
                [ranks[id(part)] for part in trainer.optimizers.model_parts],
                self._clock,
            )
        else:
            self._order = read_order(trainer.pp_schedule)

    def recorder(self, settings: FreezeSettings | None) -> ActionRecorder:
        """Put clocks on the stages of this process; without settings they freeze nothing."""
        recorder = ActionRecorder(self._clock)
        if self._emulates:
            recorder = EmulatedRecorder(self._clock, self._order)
        attach_clocks(adopt_stages(stages_of(self._trainer.pp_schedule)), recorder, settings)
        return recorder

    def emulation(self, recorder: ActionRecorder) -> EmulationRecord | None:
        """Return the maker of virtual steps; None for a real pipeline."""
        if self._optimizers is None or not isinstance(recorder, EmulatedRecorder):
            return None
        n_batches = self._trainer.gradient_accumulation_steps
        return EmulationRecord(recorder, self._optimizers, self._order.n_ranks, n_batches)

    def controller(self, recorder: ActionRecorder) -> FreezeController:
        """Return the controller of the configured method."""
        trainer, freezing = self._trainer, self._config.freezing
        method = parse_method(freezing.method)
        assert method is not None  # without a method there is no controller
        stages, outside, store = stages_of(trainer.pp_schedule), None, None
        if caches(self._config):
            cache, place = freezing.cache, Path(cache_folder(self._config))
            folder = folder_for(place, dist.get_rank(), cache.disk_gib)
            store = ActivationStore(int(cache.memory_gib * GIB), folder)
        if self._optimizers is not None:
            outside = OutsideClock(self._clock, self._optimizers.waited_ms)
            for stage in stages:
                if stage.low_rank is not None:
                    rank = self._order.stage_to_rank[stage.stage_index]
                    stage.low_rank.timed_update = partial(self._optimizers.of_rank, rank)
        return build_controller(
            stages,
            self._order,
            freeze_settings(freezing),
            None if method.policy is None else policy_of(trainer, method.policy),
            recorder,
            device=trainer.device,
            n_processors=self._n_processors,
            on_solved=partial(
                trainer.metrics_processor.save_plan,
                n_processors=self._n_processors,
                sizes=partial(model_sizes, self._config),
            ),
            # Between stages of one process there are no links.
            transfers=dict if self._emulates else None,
            measures_energy=True,
            outside=outside,
            optimizers=trainer.optimizers.optimizers,
            store=store,
            front_identity=front_identity(trainer),
            state=EmulatedState if self._emulates else FreezingState,
        )


def policy_of(trainer: "FreezingTrainer", name: str) -> FreezePolicy:
    """Return the policy's settings, in steps of this run; of pictures whole ones are compared."""
    policy: Any = getattr(trainer.job_config.freezing, name)
    if isinstance(policy, Egeria) and not model_family(trainer.job_config).reads_text:
        policy = replace(policy, max_tokens=0)
    if not getattr(policy, "checks_per_epoch", 0):
        return policy
    training, dims = trainer.job_config.training, trainer.parallel_dims
    n_readers = dims.dp_replicate * dims.dp_shard
    rows = training.local_batch_size * n_readers * trainer.gradient_accumulation_steps
    n_steps = trainer.dataloader.dataset.n_examples_of_epoch / rows
    policy = policy.in_epochs_of(n_steps)
    logger.info(f"freezing.{name} checks every {policy.check_interval} of {n_steps:.1f} steps")
    return policy


def front_identity(trainer: "FreezingTrainer") -> str:
    """Return the influences on the front's output besides weights and tokens."""
    config, dtypes = trainer.job_config, trainer.job_config.training
    numbers = dtypes.dtype, dtypes.mixed_precision_param, torch.get_default_dtype()
    are_cast = {dtypes.dtype, dtypes.mixed_precision_param} != {"float32"}
    # FSDP casts others than autocast.
    casts = are_cast and trainer.parallel_dims.fsdp_enabled
    made_by = config.model.converters, config.compile, torch.__version__, trainer.device.type
    return repr((trainer.model_args, *numbers, casts, *made_by))
