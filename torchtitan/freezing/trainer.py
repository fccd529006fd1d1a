"""TorchTitan's trainer with the phases of freezing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

import torchtitan.components.metrics as titan_metrics
from timelyfreeze.controller import FreezeController
from timelyfreeze.exchange import Exchange
from timelyfreeze.methods import parse_method
from timelyfreeze.policy import NONE
from timelyfreeze.policy_checks import checks_for
from timelyfreeze.recorder import ActionRecorder, clock_for
from timelyfreeze.settings import KEEP_CHAIN
from timelyfreeze.torch_pipelining import read_order, stages_of
from timelyfreeze.transfers import measure_transfers
from torchtitan.cpu_device import shared_cores
from torchtitan.distributed import ParallelDims
from torchtitan.document_attention import to_every_stage
from torchtitan.freezing.checks import freeze_settings
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.progress import quiet_unless
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

CHECKPOINT_KEY = "freezing"


class FreezingTrainer(Trainer):
    """Upstream's trainer with the freeze controller around each step and each pipeline batch."""

    job_config: JobConfig
    controller: FreezeController | None = None

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        if job_config.freezing.method != NONE:
            self._build_controller()
        self.metrics_processor.begin_run(self.controller)

    def init_distributed(self) -> ParallelDims:
        """Set up the process groups, then let only the rank that has the loss talk."""
        parallel_dims = super().init_distributed()
        shown = dist.get_rank() == titan_metrics._get_metrics_rank(parallel_dims, self.job_config)
        quiet_unless(shown, dist.get_rank())
        return parallel_dims

    def _build_controller(self) -> None:
        method = parse_method(self.job_config.freezing.method)
        assert method is not None  # the caller saw to it
        settings = freeze_settings(self.job_config.freezing)
        n_processors = self._shared_processors()
        recorder = ActionRecorder(clock_for(self.device, shared=n_processors is not None))
        stages = stages_of(self.pp_schedule)
        keep_chain = method.plans and settings.first_stage == KEEP_CHAIN
        for stage in stages:
            stage.attach(recorder, keep_chain=keep_chain)
        self.loss_fn.timed = recorder.measure_more
        exchange = Exchange()
        checks = None
        if method.policy is not None:
            policy = getattr(self.job_config.freezing, method.policy)
            checks = checks_for(stages, policy, settings, exchange, clock_for(self.device))
        order = read_order(self.pp_schedule)
        self.controller = FreezeController(
            stages,
            order,
            settings,
            recorder,
            exchange,
            checks,
            n_processors=n_processors,
            on_solved=self.metrics_processor.save_plan,
            measure_transfers=partial(measure_transfers, stages, order, exchange, self.device),
        )
        self.checkpointer.states[CHECKPOINT_KEY] = self.controller

    def _shared_processors(self) -> float | None:
        """Return how many ranks of a pipeline compute at once; None if each has its own device."""
        if self.device.type != "cpu":
            return None
        n_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        cores = shared_cores(n_local_ranks, torch.get_num_threads())
        if cores is None:
            return None
        logger.info(
            "%d ranks share %g cores; the plan and its prediction take that into account",
            n_local_ranks,
            cores,
        )
        return cores * self.parallel_dims.pp / n_local_ranks

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield upstream's batches, with padding taken out of the token counts."""
        for input_dict, labels in super().batch_generator(data_iterable):
            n_tokens = input_dict.pop("n_tokens", None)
            if n_tokens is not None:
                padding = labels.numel() - int(n_tokens.sum())
                self.ntokens_seen -= padding
                self.metrics_processor.ntokens_since_last_log -= padding
            yield input_dict, labels

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Sort out what the first stage and what every stage gets, positions among the latter."""
        inputs, labels, extra_inputs, extra_kwargs = super().post_dataloading_process(
            input_dict, labels
        )
        return inputs, labels, *to_every_stage(extra_inputs, extra_kwargs)

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Run one optimizer step in its phase."""
        started = time.perf_counter()
        tokens_before = self.ntokens_seen
        if self.controller is not None:
            self.controller.begin_step(self.step)
        super().train_step(data_iterator)
        if self.controller is not None:
            self.controller.end_step()
        self.metrics_processor.end_step(
            self.step, time.perf_counter() - started, self.ntokens_seen - tokens_before
        )

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run one pipeline batch, its loss divided by the step's tokens before the backward."""
        if not self.parallel_dims.pp_enabled:
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        one_pass = nullcontext() if self.controller is None else self.controller.one_pass()
        with self.loss_fn.divided_by(global_valid_tokens), one_pass:
            return super().forward_backward_step(
                input_dict=input_dict,
                labels=labels,
                global_valid_tokens=torch.ones((), device=self.device),
            )

    def train(self) -> None:
        """Train, then report.

        Raises:
            ValueError: If the checkpoint to resume from belongs to another freezing method.
        """
        try:
            super().train()
        except CheckpointException as error:
            if f"Missing key in checkpoint state_dict: {CHECKPOINT_KEY}." not in str(error):
                raise
            raise ValueError(
                "the checkpoint has no state for freezing.method "
                f"{self.job_config.freezing.method!r}: it was saved under another one, or without "
                "freezing; resume with the same method, or, to begin freezing anew, set "
                f'checkpoint.exclude_from_loading = ["{CHECKPOINT_KEY}"]'
            ) from error
        self.metrics_processor.end_run()
