"""A run from first to last step: hands upstream's events to all parts."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_tools
from torch import nn
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger as titan_logger
from torchtitan.tools.utils import NoColor

from timelyfreeze.control import CollectedMetrics, FreezeController
from timelyfreeze.planning import FreezePlan, plan_to_json
from timelyfreeze.policies import makes_plan
from timelyfreeze.records.tables import Move
from timelyfreeze.runtime import Exchange
from timelyfreeze.schedule import order_to_csv
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds
from timelyfreeze.whatif.bounds_file import bounds_file_text
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report import batches, losses, reports, steps, times
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, Run, RunPart
from torchtitan.freezing.report.plots import RunPlots
from torchtitan.freezing.report.progress import Progress
from torchtitan.freezing.report.run_folder import make_run_folder, number_former
from torchtitan.freezing.report.tensorboard import RunTensorBoard
from torchtitan.lora.adapters import count_trained
from torchtitan.settings import (
    JobConfig,
    model_family,
    padding_note,
    pipeline_metadata,
    preset_line,
)
from torchtitan.upstream.fixes import lines_count

# What is of one pipeline, by what is numbered together: where another one follows, it stays.
_OF_A_PIPELINE = (
    ("schedule.csv", "responses.csv"),
    ("bounds.json", "plan.json"),
    *((f"timelines/measured_{phase.value}.json",) for phase in Phase if phase is not Phase.WARMUP),
)


class PipelineFiles(RunPart):
    """Writes the order of actions, and their measurements and solutions."""

    def begin_pipeline(self) -> None:
        """Write the order; files of a former pipeline get a number and stay."""
        run = self.run
        if run.is_shown:
            for names in _OF_A_PIPELINE:
                number_former(run.folder, names)
        if run.controller is not None:
            run.write("schedule.csv", order_to_csv(run.controller.active_plan.order))

    def begin_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Write a plan and its sources; files of an earlier plan get a number."""
        run, controller = self.run, self.run.controller
        if not run.is_shown or controller is None:
            return
        n_processors, sizes = about["n_processors"], about["sizes"]()  # counted here alone
        order = controller.active_plan.order
        notes = pipeline_metadata(run.config, order, run.n_layers, n_processors, sizes)
        notes = replace(notes, gradient_rank=controller.subspaces.dimension)
        number_former(run.folder, ("bounds.json", "plan.json"))
        run.write("schedule.csv", order_to_csv(order))
        run.write("bounds.json", bounds_file_text(controller.active_plan.dag, bounds, notes))
        run.write("plan.json", plan_to_json(plan))


class RunRecorder:
    """Hands the events of a run to its parts, in their order, on every rank.

    A moving run keeps its recorder: a pipeline is never longer than the first, so the process with
    the loss stays the same.
    """

    def __init__(
        self, run: Run, parts: Sequence[RunPart], progress: Progress, logger: BaseLogger
    ) -> None:
        self.run, self.parts, self.progress, self.logger = run, parts, progress, logger

    def begin_pipeline(
        self,
        controller: FreezeController | None,
        emulation: EmulationRecord | None = None,
        ranks_per_replica: int | None = None,
    ) -> None:
        """Begin to observe a pipeline, the first or another."""
        run = self.run
        if emulation is not None and run.emulation is not None:
            emulation.go_on_from(run.emulation)
        run.controller, run.emulation = controller, emulation
        run.ranks_per_replica = ranks_per_replica or run.ranks_per_replica
        if controller is not None:
            controller.log.on_batch = partial(self.tell, RunPart.batch)
        self.tell(RunPart.begin_pipeline)

    def tell(self, hook: Callable[..., object], *told: Any, **about: Any) -> None:
        """Call a hook of all parts; a part's failure to write files ends no training."""
        for part in self.parts:
            with self.run.writing():
                getattr(part, hook.__name__)(*told, **about)

    def leave(self) -> None:
        """Write all data of a pipeline, and release it; a collective call."""
        self._gather()
        self.tell(RunPart.leave)
        self.run.controller = None  # room for the next pipeline

    def log_step(self, step: int, loss: float, grad_norm: float) -> dict[str, float]:
        """Return the metrics of freezing of a logged step, by tag; all ranks come here."""
        phase = self.run.phase_of(step)
        logged = LoggedStep(step, loss, grad_norm, phase, self._collect(grad_norm))
        tags: dict[str, float | None] = {}
        for part in self.parts:
            with self.run.writing():
                tags |= part.log_step(logged) or {}
        return {tag: value for tag, value in tags.items() if value is not None}

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Note a finished step; its tokens are of the processes sharing a batch."""
        self.run.seconds += seconds
        of_device = n_tokens / self.run.ranks_per_replica
        ended = EndedStep(step, self.run.phase_of(step), seconds, n_tokens, of_device)
        self.tell(RunPart.end_step, ended)

    def end(self, ended_early: str | None = None, device_seconds: float | None = None) -> None:
        """Gather the rest, write the summary, show the report; a collective call.

        ``device_seconds`` are of the whole run, earlier parts included.
        """
        self._gather()
        seconds = None if self.run.emulation is not None else device_seconds
        summary = replace(self.run.start, ended_early=ended_early, device_seconds=seconds)
        for part in self.parts:
            with self.run.writing():
                summary = replace(summary, **part.fields(summary))
        self.tell(RunPart.finish, summary)

    def close(self) -> None:
        self.tell(RunPart.close)
        self.logger.close()

    def _gather(self) -> None:
        self._collect()
        self.tell(RunPart.gather)

    def _collect(self, grad_norm: float = math.nan) -> CollectedMetrics | None:
        if self.run.controller is None:
            return None
        # What undoes the clipping of gradients.
        max_norm, is_finite = self.run.config.training.max_norm, math.isfinite(grad_norm)
        metrics = self.run.controller.collect(max(1.0, grad_norm / max_norm) if is_finite else None)
        self.tell(RunPart.collect, metrics)
        return metrics


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor, handing its events to the run's recorder.

    Every rank has a processor; only the rank with the loss shows and writes. There is no recorder
    before :meth:`begin_run`, nor once the run goes on elsewhere.
    """

    recorder: RunRecorder
    job_config: JobConfig
    model_parts: list[nn.Module]

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, *args: Any, **kwargs: Any
    ) -> None:
        without_loggers = replace(job_config.metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(replace(job_config, metrics=without_loggers), parallel_dims)
        self.job_config = job_config
        if not sys.stdout.isatty():
            self.color = NoColor()
        self._units = partial(lines_count, model_family(job_config).unit, padding_note(job_config))
        self._n_layers = getattr(args[0], "n_layers", None) if args else None

    def begin_run(
        self,
        controller: FreezeController | None,
        emulation: EmulationRecord | None = None,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Begin a pipeline of a new run, or of a run with a recorder."""
        self.recorder = recorder or self._open_recorder()
        self.recorder.begin_pipeline(
            controller, emulation, self.parallel_dims.non_data_parallel_size
        )
        self.logger = self.recorder.logger

    def _open_recorder(self) -> RunRecorder:
        """Make a run's folder and open its files; a collective call."""
        config, dims, monitor = self.job_config, self.parallel_dims, self.device_memory_monitor
        is_shown = dist.get_rank() == titan_metrics._get_metrics_rank(dims, config)
        folder = make_run_folder(config, create=is_shown)
        n_copies = max(1, dims.world_size // dims.pp)  # an emulation has all stages in one
        start = replace(
            times.summary_at_start(config, dims, monitor.device_name, titan_tools.device_type),
            **count_trained(self.model_parts, n_copies),
        )
        about = self._n_layers, monitor.device, self.num_flops_per_token, self.gpu_peak_flops
        run = Run(config, start, folder, is_shown, Exchange(), *about)
        # Upstream would open a TensorBoard folder named by the minute, in which runs started
        # together mix.
        others = replace(config, metrics=replace(config.metrics, enable_tensorboard=False))
        logger = titan_metrics._build_metric_logger(others, dims)
        tensorboard, all_ranks = None, config.metrics.save_for_all_ranks
        if config.metrics.enable_tensorboard and (is_shown or all_ranks):
            name = f"rank_{dist.get_rank()}" if all_ranks else ""
            tensorboard = RunTensorBoard(str(folder / name), run)
            both = LoggerContainer()
            both.add_logger(logger)
            both.add_logger(tensorboard)
            logger = both
        return record(run, tensorboard, logger)

    def leave(self) -> RunRecorder:
        """Write all data so far, and give away the recorder for another trainer."""
        recorder = self.recorder
        recorder.leave()
        del self.recorder
        return recorder

    def record_move(self, step: int, n_frozen: int, split: Sequence[float], seconds: float) -> None:
        """Note the move to this trainer, as in ``moves.csv``; without ``split`` cut as before."""
        layers, n_replicas = " ".join(f"{n:g}" for n in split), self.recorder.run.n_replicas
        n_ranks = len(split) or self.job_config.parallelism.pipeline_parallel_degree
        move = Move(step, n_frozen, n_ranks, n_replicas, layers, seconds)
        self.recorder.tell(RunPart.move, move)
        self.time_last_log = time.perf_counter()

    def save_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Keep measurements and solutions; ``about`` as ``RunPart.begin_plan``."""
        self.recorder.tell(RunPart.begin_plan, plan, bounds, **about)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's metrics and freezing's; a collective call at the same steps."""
        ours = self.recorder.log_step(step, global_avg_loss, grad_norm)
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        progress = self.recorder.progress
        progress.note(global_avg_loss, tokens / seconds if seconds > 0.0 else None)
        extra = {**(extra_metrics or {}), **ours}
        with progress.instead_of_upstream(), self._units():
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def log_held_out(self, step: int, parts: Sequence[tuple[int, float]]) -> None:
        """Take note of targets and loss of each part of a validation, as of ``log_validation``."""
        self.recorder.tell(RunPart.log_held_out, step, parts)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; a collective call, with the loss on the shown rank."""
        self.recorder.tell(RunPart.log_validation, step, loss, extra_metrics or {})
        with self._units():
            super().log_validation(loss, step, extra_metrics)

    def close(self) -> None:
        """Close displays and logs, unless the run goes on elsewhere."""
        if hasattr(self, "recorder"):
            self.recorder.close()


def record(run: Run, tensorboard: RunTensorBoard | None, logger: BaseLogger) -> RunRecorder:
    """Return the recorder of a run, and write its configuration.

    Parts are ordered by tags, by fields derived from earlier parts, and by the final output.
    """
    if run.is_shown and (told := preset_line(run.config)) is not None:
        titan_logger.info(told)
    ranks = run.config.freezing.gradient_ranks
    if run.is_shown and makes_plan(run.config.freezing.method) and ranks != (0,):
        told = " or ".join(map(str, ranks))
        titan_logger.info(f"Frozen weights still learn, in {told} directions each")
    run.write("settings.json", json.dumps(run.config.to_dict(), indent=2) + "\n")
    progress = Progress(run)
    parts: list[RunPart] = [
        PipelineFiles(run), times.StepTimes(run), times.BatchTimes(run), steps.Front(run),
        steps.Moves(run), steps.Steps(run), losses.Losses(run), batches.Responses(run),
        steps.Counts(run), batches.Timelines(run), batches.Padding(run), times.Memory(run),
        times.Outcome(run), losses.Reference(run), losses.FiniteWatch(run), progress,
    ]  # fmt: skip
    if run.is_shown and tensorboard is not None:
        parts.append(tensorboard)
    parts.append(reports.Report(run))
    if run.is_shown and run.config.plots.enable:
        parts.append(RunPlots(run, None if tensorboard is None else tensorboard.writer))
    parts.append(reports.Page(run))
    return RunRecorder(run, parts, progress, logger)
