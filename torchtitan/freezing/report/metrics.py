"""Metrics of a run: upstream's metrics and those of freezing, shown, logged and recorded."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_tools
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from timelyfreeze.control import FreezeController
from timelyfreeze.planning import FreezePlan
from timelyfreeze.timing import DurationBounds
from timelyfreeze.whatif.loads import UNKNOWN_SIZES, ModelSizes
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report.losses import FiniteWatch
from torchtitan.freezing.report.plots import RunPlots
from torchtitan.freezing.report.progress import Progress
from torchtitan.freezing.report.recorder import RunRecorder
from torchtitan.freezing.report.run_folder import OutputGuard, make_run_folder
from torchtitan.freezing.report.run_record import summary_at_start
from torchtitan.freezing.report.tensorboard import RunTensorBoard


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor with a folder per run, freezing metrics, progress and a report.

    Every rank has one, since metrics are gathered from all; only the rank that has the loss shows
    and writes.

    Attributes:
        run_folder: Where the rank that is shown writes.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, *args: Any, **kwargs: Any
    ) -> None:
        # Upstream would open a TensorBoard folder named by the minute, in which runs started
        # together mix.
        without_tensorboard = replace(
            job_config, metrics=replace(job_config.metrics, enable_tensorboard=False)
        )
        super().__init__(without_tensorboard, parallel_dims)
        self.job_config = job_config
        shown_rank = titan_metrics._get_metrics_rank(parallel_dims, job_config)
        self._is_shown = dist.get_rank() == shown_rank
        self.run_folder = make_run_folder(job_config, create=self._is_shown)
        if not sys.stdout.isatty():
            self.color = NoColor()
        self._controller: FreezeController | None = None
        self._guard = OutputGuard(self.run_folder)
        device_name = self.device_memory_monitor.device_name
        self._recorder = RunRecorder(
            job_config,
            summary_at_start(job_config, parallel_dims, device_name, titan_tools.device_type),
            self.run_folder,
            self._guard,
            writes=self._is_shown,
            n_layers=getattr(args[0], "n_layers", None) if args else None,
        )
        self._watch = FiniteWatch()
        self._has_new_plots = False
        self._is_quiet = job_config.report.quiet
        self._progress = Progress(
            job_config.training.steps, shown=self._is_shown and not self._is_quiet
        )
        self._tensorboard: RunTensorBoard | None = None
        all_ranks = job_config.metrics.save_for_all_ranks
        if job_config.metrics.enable_tensorboard and (self._is_shown or all_ranks):
            self._open_tensorboard(f"rank_{dist.get_rank()}" if all_ranks else "")
        self._plots: RunPlots | None = None
        if self._is_shown and job_config.plots.enable:
            board = self._tensorboard
            self._plots = RunPlots(self.run_folder, None if board is None else board.writer)

    def _open_tensorboard(self, name: str) -> None:
        folder = str(self.run_folder / name)
        self._tensorboard = RunTensorBoard(folder, self.job_config, self._guard)
        loggers = LoggerContainer()
        loggers.add_logger(self.logger)
        loggers.add_logger(self._tensorboard)
        self.logger = loggers

    def begin_run(
        self, controller: FreezeController | None, emulation: EmulationRecord | None = None
    ) -> None:
        """Start showing and recording; as ``RunRecorder.begin``."""
        self._controller = controller
        self._recorder.begin(
            controller,
            emulation,
            flops_per_token=self.num_flops_per_token,
            peak_flops=self.gpu_peak_flops,
        )

    def save_plan(
        self,
        plan: FreezePlan,
        bounds: DurationBounds,
        n_processors: float | None = None,
        sizes: ModelSizes = UNKNOWN_SIZES,
    ) -> None:
        """Keep what was measured and what was solved; as ``RunRecorder.save_plan``."""
        self._recorder.save_plan(plan, bounds, n_processors, sizes)
        self._has_new_plots = True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's metrics and those of freezing; all ranks come here at the same steps."""
        ours = self._recorder.log(step, global_avg_loss, grad_norm)
        extra = {**(extra_metrics or {}), **ours}
        self._draw(step)
        self._warn_unless_finite(step, global_avg_loss, grad_norm)
        self._note_peak_memory()
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        kappa = self._recorder.latest_kappa
        self._progress.note(
            loss=global_avg_loss,
            tokens_per_second=tokens / seconds if seconds > 0.0 else None,
            gain=1 / kappa - 1 if kappa else None,
        )
        with self._progress.instead_of_upstream():
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def _draw(self, step: int) -> None:
        """Have what is new drawn; all ranks come here, of which the one that is shown draws."""
        if self._recorder.collect_timelines():
            self._has_new_plots = True
        if self._plots is None:
            return
        self._plots.show(step)
        # Drawing could hold up the actions that are timed on a CPU meanwhile.
        is_timed = self._controller is not None and self._controller.phase.monitors
        if self._has_new_plots and not is_timed:
            self._has_new_plots = False
            self._plots.draw()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; all ranks come here, of which the one that is shown has the loss."""
        self._recorder.log_validation(step, loss)
        self._note_peak_memory()
        super().log_validation(loss, step, extra_metrics)

    def _warn_unless_finite(self, step: int, loss: float, grad_norm: float) -> None:
        phase = None if self._controller is None else self._controller.phase
        ratios = self._recorder.record.stage_ratios
        warning = self._watch.note(step, loss, grad_norm, phase, ratios)
        if warning is not None and self._is_shown:
            logger.warning(warning)

    def _note_peak_memory(self) -> None:
        """Remember the peak, which upstream resets whenever it has logged."""
        stats = titan_tools.device_module.memory_stats(self.device_memory_monitor.device)
        self._recorder.record.add_peak_memory(stats.get("reserved_bytes.all.peak", -1))

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Take note of a finished step."""
        self._recorder.end_step(step, seconds, n_tokens)
        self._progress.end_step(step, seconds, self._controller)

    def end_run(self, ended_early: str | None = None) -> None:
        """Gather what is still out, write the summary and show the report.

        Args:
            ended_early: Why the run ends before its last step; None if it does not.
        """
        self._note_peak_memory()
        summary, counts, text = self._recorder.end(ended_early)
        self._progress.close()
        if self._tensorboard is not None and self._is_shown:
            self._tensorboard.log_summary(summary)
        if self._is_shown and not self._is_quiet:
            print(text, flush=True)
        if self._plots is not None:
            self._plots.finish(summary.steps_done)
        self._recorder.write_page(summary, counts)
        if self._is_shown and self._is_quiet:
            print(f"report: {self.run_folder / 'report.md'}", flush=True)

    def close(self) -> None:
        """Close the display and upstream's loggers."""
        self._recorder.close()
        if self._plots is not None:
            self._plots.close()
        self._progress.close()
        super().close()
