"""TorchTitan's trainer with the phases of freezing."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.control import FreezeController, processors_of
from timelyfreeze.front.caching import Row, token_digest
from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.runtime import ActionRecorder, adopt_stages, run_batches_in, stages_of
from timelyfreeze.runtime.linear import keep_copies
from timelyfreeze.settings import name_arguments
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.data.sequences import learned_tokens, to_every_stage
from torchtitan.freezing.assembly import Assembly
from torchtitan.freezing.elastic.part import Leave, SharedRun, inside
from torchtitan.freezing.emulation.pipeline import EmulatedDims, LoneDims, as_one_process
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.partition.cut import partition_line
from torchtitan.freezing.report.parts import RunPart
from torchtitan.freezing.report.progress import quiet_unless
from torchtitan.freezing.report.recorder import FreezingMetricsProcessor
from torchtitan.freezing.stop_request import StopRequest
from torchtitan.freezing.values.freezing import caches, freeze_settings
from torchtitan.settings import JobConfig, has_pipeline, toml_key
from torchtitan.upstream.cpu_device import slow_precision
from torchtitan.upstream.fixes import copy_without_wait, one_cast_for_all
from torchtitan.vision.model import shares_of_target

CHECKPOINT_KEY = "freezing"
ALL_TOKENS = "ntokens_seen_by_all"
DEVICE_SECONDS = "device_seconds"

_Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class FreezingTrainer(Trainer):
    """Upstream's trainer with the freeze controller around steps and pipeline batches.

    Parts of its run add to it, and one may have it end before a step: ``leave``. ``device_seconds``
    are seconds of all steps and moves, times the processes.
    """

    leave: Leave | None = None
    device_seconds = 0.0
    job_config: JobConfig
    checkpointer: SafeCheckpointManager
    metrics_processor: FreezingMetricsProcessor
    dataloader: Any  # upstream's or ours, as are the two below
    loss_fn: Any
    model_args: Any
    controller: FreezeController | None = None
    recorder: ActionRecorder | None = None
    emulation: EmulationRecord | None = None

    def __init__(self, job_config: JobConfig, run: SharedRun | None = None) -> None:
        name_arguments(toml_key)
        self._run = run or SharedRun()
        self._caches = caches(job_config)
        self._rows: list[list[Row]] = []
        super().__init__(job_config)
        freezes = freezes_by_turns(job_config.freezing.method)
        if freezes or job_config.emulation.enable:
            assembly = Assembly(self, self._shared_processors())
            settings = freeze_settings(job_config.freezing) if freezes else None
            self.recorder = assembly.recorder(settings)
            run_batches_in(self.pp_schedule, self._one_batch, self.recorder.measure_more)
            self.emulation = assembly.emulation(self.recorder)
            if freezes:
                self.controller = assembly.controller(self.recorder)
                self.checkpointer.states[CHECKPOINT_KEY] = self.controller
        elif self.parallel_dims.pp_enabled:
            adopt_stages(stages_of(self.pp_schedule))  # split backwards of 16-bit layers
        self.metrics_processor.job_config = self._run.told or job_config
        self.checkpointer.settings = self.metrics_processor.job_config.to_dict()
        timeout = timedelta(seconds=job_config.comm.init_timeout_seconds)
        self.stop = StopRequest(timeout if job_config.comm.mode == "default" else None)
        self._steps_done: int | None = None
        self.metrics_processor.begin_run(self.controller, self.emulation, self._run.output)
        for part in self._run.parts:
            part.attach(self)

    def init_distributed(self) -> ParallelDims:
        """Set up the process groups, then let only the rank with the loss talk.

        Meshes of the same ranks and names are equal, and torch's caches would go on with the first
        meshes' process groups: a trainer takes the dimensions of a former one of its degrees.
        """
        if not self.job_config.emulation.enable:
            parallel_dims = super().init_distributed()
            if parallel_dims.pp == 1 and has_pipeline(self.job_config):
                parallel_dims = LoneDims.of(parallel_dims)
        else:
            with as_one_process(self.job_config):
                parallel_dims = EmulatedDims.of(super().init_distributed())
        shown = dist.get_rank() == titan_metrics._get_metrics_rank(parallel_dims, self.job_config)
        if self._run.output is not None:
            shown = self._run.output.run.is_shown
        quiet_unless(shown, dist.get_rank())
        if shown and (told := partition_line(self.job_config)) is not None:
            logger.info(told)
        dtype = TORCH_DTYPE_MAP[self.job_config.training.mixed_precision_param]
        if shown and (told := slow_precision(dtype, self.device)) is not None:
            logger.warning(told)
        degrees = parallel_dims.pp, parallel_dims.dp_replicate, parallel_dims.dp_shard
        return self._run.dims.setdefault(degrees, parallel_dims)

    def _shared_processors(self) -> float | None:
        """Return how many ranks of a pipeline compute at once; None for a device per rank."""
        emulates = self.job_config.emulation.enable
        return None if emulates else processors_of(self.device, self.parallel_dims.pp)

    def batch_generator(self, data_iterable: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield upstream's batches, with padding taken out of the token counts if so wanted."""
        counts_padding = self.job_config.report.count_padding
        for input_dict, labels in super().batch_generator(data_iterable):
            n_tokens = getattr(input_dict, "n_tokens", None)  # not of upstream's texts
            checks = None if self.controller is None else self.controller.checks
            if n_tokens is not None and checks is not None:
                checks.record_tokens(n_tokens)
            rows = getattr(input_dict, "rows", None)
            if rows is not None and self._caches:
                pairs = zip(rows.tolist(), input_dict["input"], strict=True)
                self._rows.append([Row(row, token_digest(tokens)) for row, tokens in pairs])
            # A row of shares is one target, though it has a number for each class.
            uncounted = labels.numel() - labels.numel() // shares_of_target(labels)
            if n_tokens is not None:
                n_padding = labels.numel() - int(n_tokens.sum())
                self.metrics_processor.recorder.tell(RunPart.read, labels.numel(), n_padding)
                uncounted += 0 if counts_padding else n_padding
            self.ntokens_seen -= uncounted
            self.metrics_processor.ntokens_since_last_log -= uncounted
            if n_tokens is not None and getattr(self.loss_fn, "of_learned", False):
                input_dict |= learned_tokens(labels)
            copy_without_wait((*input_dict.values(), labels))
            yield input_dict, labels

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Separate the first stage's inputs from every stage's."""
        inputs, labels, extra, kwargs = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, *to_every_stage(extra, kwargs)

    def train_step(self, data_iterator: Iterator[_Batch]) -> None:
        """Run an optimizer step in its phase; the controller knows its rows if stored."""
        with inside(part.around_step() for part in self._run.parts):
            started = time.perf_counter()
            if self.emulation is not None:
                self.emulation.begin_step()
            tokens_before = self.ntokens_seen
            if self.controller is not None:
                self.controller.begin_step(self.step)
            batches = self._batches_of_step(data_iterator)
            if self.controller is not None and (cache := self.controller.cache) is not None:
                self._rows = []
                batches = iter(list(islice(batches, self.gradient_accumulation_steps)))
                cache.name_batches(self._rows)
                cache.read_ahead(self.dataloader.upcoming)
            super().train_step(batches)
            if self.controller is not None:
                self.controller.end_step()
            seconds = time.perf_counter() - started
            self.device_seconds += seconds * self.parallel_dims.world_size
            self.metrics_processor.recorder.end_step(
                self.step, seconds, self.ntokens_seen - tokens_before
            )

    def _batches_of_step(self, data_iterator: Iterator[_Batch]) -> Iterator[_Batch]:
        """Return the batches of the next step; examples end on all replicas at once."""
        is_endless = getattr(getattr(self.dataloader, "dataset", None), "infinite", False)
        if is_endless or not self.parallel_dims.dp_enabled:
            return data_iterator
        batches = []
        with suppress(DataloaderExhaustedError):
            for _ in range(self.gradient_accumulation_steps):
                batches.append(next(data_iterator))
        if self.stop.is_so_anywhere(len(batches) < self.gradient_accumulation_steps):
            raise DataloaderExhaustedError
        return iter(batches)

    def forward_backward_step(
        self, *, labels: torch.Tensor, global_valid_tokens: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """Run a pipeline batch, its loss divided by the step's tokens before the backward."""
        global_valid_tokens = global_valid_tokens / shares_of_target(labels)
        run = partial(super().forward_backward_step, labels=labels, **inputs)
        if not self.parallel_dims.pp_enabled:
            return run(global_valid_tokens=global_valid_tokens)
        with (
            inside(part.around_batch(inputs["input_dict"], labels) for part in self._run.parts),
            self.loss_fn.divided_by(global_valid_tokens),
            one_cast_for_all(),
            keep_copies(self.model_parts),
        ):
            return run(global_valid_tokens=torch.ones((), device=self.device))

    def _one_batch(self) -> AbstractContextManager[None]:
        """Return the context of a pipeline batch: masks and clocks, clocks alone, or nothing."""
        if self.controller is not None:
            return self.controller.one_batch()
        return nullcontext() if self.recorder is None else self.recorder.recorded_batch()

    def train(self) -> None:
        """Train, then report; by a signal to stop, save a checkpoint first, and then exit."""
        with self.stop.listening():
            try:
                super().train()
            except Exception as error:
                self._tell_where(error)
                raise
            if self.leave is not None and self.leave.config is not None:
                return
            ended_early = self._end_early()
            self.metrics_processor.recorder.end(ended_early, self.device_seconds)
            stopped_by = self.stop.settled()
            if ended_early is not None and stopped_by is not None:
                self.close()
                dist.barrier()  # whoever ends first has torchrun end the others
                dist.destroy_process_group()
                raise SystemExit(128 + stopped_by)
        for part in self._run.parts:
            part.end()

    def _tell_where(self, error: Exception) -> None:
        """Log a failure's step and the kept checkpoint, above torch's stack trace."""
        phase = "" if self.controller is None else f" ({self.controller.step.phase.value})"
        kept = "no checkpoint is kept, since checkpoint.enable is false"
        if self.checkpointer.enable:
            kept = self.checkpointer.last_finished()
        why = (str(error) or type(error).__name__).splitlines()[0]
        logger.error(
            f"Rank {dist.get_rank()} ends in step {self.step}{phase}: {why}; if it speaks of a "
            "connection or a timeout, another rank died or hung before, and torchrun names the "
            f"first; {kept}"
        )

    def should_continue_training(self) -> bool:
        """Return whether there is another step: not after the last, nor once asked to stop."""
        if self._steps_done is None:
            for part in self._run.parts:
                part.begin()
        self._steps_done = self.step
        stopped_by = self.stop.agreed()
        if not super().should_continue_training() or stopped_by is not None:
            return False
        self.leave = next(filter(None, (part.before_step() for part in self._run.parts)), None)
        return self.leave is None

    def _end_early(self) -> str | None:
        """Save a run ending before its last step; return the reason."""
        n_steps = self.job_config.training.steps
        done, self.step = self.step, self._steps_done if self._steps_done is not None else self.step
        if self.step >= n_steps:
            return None
        # A step without examples is not one: upstream counts it and then cancels it.
        ran_out = done > self.step
        saved = self.checkpointer.save_now(self.step, last_step=ran_out)
        stopped_by = None if ran_out else self.stop.settled()
        why = "no more examples" if self.leave is None else self.leave.why
        why = why if stopped_by is None else f"stopped by {stopped_by.name}"
        return f"{why} after step {self.step} of {n_steps}{saved}"

    def state_dict(self) -> dict[str, Any]:
        """Return upstream's state, and all processes' device seconds; a collective call."""
        n_tokens = self.ntokens_seen
        if self.parallel_dims.dp_enabled:
            mine = torch.tensor(n_tokens, dtype=torch.int64, device=self.device)
            n_tokens = int(titan_dist.dist_sum(mine, self.parallel_dims.get_mesh("batch")))
        ours = {ALL_TOKENS: n_tokens, DEVICE_SECONDS: self.device_seconds}
        return {**super().state_dict(), **ours}

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the states to load from a checkpoint with ``keys`` of the trainer."""
        ours = (ALL_TOKENS, DEVICE_SECONDS)
        return {k: v for k, v in self.state_dict().items() if k not in ours or k in keys}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, of any number of replicas."""
        super().load_state_dict(state_dict)
        self.device_seconds = float(state_dict.get(DEVICE_SECONDS, 0.0))
        if ALL_TOKENS in state_dict:  # upstream has one replica's count for all
            rank, size = 0, 1
            if self.parallel_dims.dp_enabled:
                mesh = self.parallel_dims.get_mesh("batch")
                rank, size = mesh.get_local_rank(), mesh.size()
            whole, rest = divmod(int(state_dict[ALL_TOKENS]), size)
            self.ntokens_seen = whole + (rank < rest)

    def close(self) -> None:
        """End background work, then upstream's resources."""
        if self.controller is not None:
            self.controller.close()
        if isinstance(self.parallel_dims, EmulatedDims):
            self.parallel_dims.pipeline.clear()  # a run that goes on elsewhere keeps the dimensions
        super().close()
        self.stop.close()
