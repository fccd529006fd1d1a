"""Everything through which a run is seen: its folder and records, display, loggers, plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_tools
from torchtitan.components.metrics import BaseLogger, LoggerContainer
from torchtitan.distributed import ParallelDims

from torchtitan.freezing.config import JobConfig, model_family
from torchtitan.freezing.report.losses import FiniteWatch
from torchtitan.freezing.report.plots import RunPlots
from torchtitan.freezing.report.progress import Progress
from torchtitan.freezing.report.recorder import RunRecorder
from torchtitan.freezing.report.run_folder import OutputGuard, make_run_folder
from torchtitan.freezing.report.run_record import summary_at_start
from torchtitan.freezing.report.tensorboard import RunTensorBoard


@dataclass
class RunOutput:
    """What a process shows and writes of a run, from its first step to its last.

    A run that moves to another pipeline goes on with the same one: a pipeline is never longer than
    the first, so the process that had the loss there has it in all of them.

    Attributes:
        is_shown: Whether it is the process that has the loss, which shows and writes.
        folder: Of the run.
        recorder: Collects what the run tells of itself.
        progress: The line in a terminal.
        logger: TensorBoard and others that upstream writes metrics to.
        tensorboard: That of them; None if there is none.
        plots: Has plots drawn; None if nothing is drawn.
        watch: Looks for losses that are not finite.
        has_new_plots: Whether there is something that was not drawn yet.
    """

    is_shown: bool
    folder: Path
    recorder: RunRecorder
    progress: Progress
    logger: BaseLogger
    tensorboard: RunTensorBoard | None
    plots: RunPlots | None
    watch: FiniteWatch = field(default_factory=FiniteWatch)
    has_new_plots: bool = False

    def close(self) -> None:
        """Write what is still out, and close all of it."""
        self.recorder.close()
        if self.plots is not None:
            self.plots.close()
        self.progress.close()
        self.logger.close()


def open_output(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    device_name: str,
    n_layers: int | None,
    trained: Mapping[str, int],
) -> RunOutput:
    """Make a run's folder and open what goes there; every rank comes here.

    Args:
        job_config: The run's configuration.
        parallel_dims: How its processes share the work.
        device_name: What the device calls itself.
        n_layers: Layers of the model; None for a model that does not count them.
        trained: As ``count_trained`` gives it.
    """
    shown_rank = titan_metrics._get_metrics_rank(parallel_dims, job_config)
    is_shown = dist.get_rank() == shown_rank
    folder = make_run_folder(job_config, create=is_shown)
    guard = OutputGuard(folder)
    start = summary_at_start(job_config, parallel_dims, device_name, titan_tools.device_type)
    recorder = RunRecorder(
        job_config,
        replace(start, **trained),
        folder,
        guard,
        writes=is_shown,
        n_layers=n_layers,
    )
    # Upstream would open a TensorBoard folder named by the minute, in which runs started together
    # mix.
    others = replace(job_config, metrics=replace(job_config.metrics, enable_tensorboard=False))
    logger = titan_metrics._build_metric_logger(others, parallel_dims)
    tensorboard, all_ranks = None, job_config.metrics.save_for_all_ranks
    if job_config.metrics.enable_tensorboard and (is_shown or all_ranks):
        name = f"rank_{dist.get_rank()}" if all_ranks else ""
        tensorboard = RunTensorBoard(str(folder / name), job_config, guard)
        logger = _both(logger, tensorboard)
    plots = None
    if is_shown and job_config.plots.enable:
        plots = RunPlots(folder, None if tensorboard is None else tensorboard.writer)
    shows_progress = is_shown and not job_config.report.quiet
    unit = model_family(job_config).unit
    progress = Progress(job_config.training.steps, shown=shows_progress, unit=unit)
    return RunOutput(is_shown, folder, recorder, progress, logger, tensorboard, plots)


def _both(first: BaseLogger, second: BaseLogger) -> BaseLogger:
    loggers = LoggerContainer()
    loggers.add_logger(first)
    loggers.add_logger(second)
    return loggers
