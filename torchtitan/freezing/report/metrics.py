"""Metrics of a run: upstream's metrics and those of freezing, shown, logged and recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_tools
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from timelyfreeze.control import FreezeController
from timelyfreeze.planning import FreezePlan
from timelyfreeze.timing import DurationBounds
from timelyfreeze.whatif.loads import UNKNOWN_SIZES, ModelSizes
from torchtitan.freezing.config import JobConfig, model_family, padding_note
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report.plots import RunPlots
from torchtitan.freezing.report.progress import Progress
from torchtitan.freezing.report.recorder import RunRecorder
from torchtitan.freezing.report.run_folder import OutputGuard, make_run_folder
from torchtitan.freezing.report.run_record import summary_at_start
from torchtitan.freezing.report.step_record import FiniteWatch
from torchtitan.freezing.report.tensorboard import RunTensorBoard
from torchtitan.freezing.report.text import shown_report
from torchtitan.lora.trained import count_trained
from torchtitan.upstream.fixes import lines_count


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor with a folder per run, freezing metrics, progress and a report.

    Every rank has one, since metrics are gathered from all; only the rank that has the loss shows
    and writes. There is nothing to write to before :meth:`begin_run`.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, *args: Any, **kwargs: Any
    ) -> None:
        without_loggers = replace(job_config.metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(replace(job_config, metrics=without_loggers), parallel_dims)
        self.job_config = job_config
        if not sys.stdout.isatty():
            self.color = NoColor()
        self._controller: FreezeController | None = None
        self._is_quiet = job_config.report.quiet
        self._unit = model_family(job_config).unit
        self._note = padding_note(job_config)
        self._n_layers = getattr(args[0], "n_layers", None) if args else None
        self._opened: RunOutput | None = None

    @property
    def run_folder(self) -> Path:
        """Where the rank that is shown writes."""
        return self._output.folder

    @property
    def _output(self) -> RunOutput:
        assert self._opened is not None  # there is nothing to tell before the run begins
        return self._opened

    def begin_run(
        self,
        controller: FreezeController | None,
        emulation: EmulationRecord | None = None,
        output: RunOutput | None = None,
    ) -> None:
        """Start showing and recording.

        Args:
            controller: None for a run without freezing.
            emulation: None where every rank has its own process.
            output: Of the run that goes on here, in another pipeline; None for a new one.
        """
        self._controller = controller
        if output is not None:
            assert controller is not None  # nothing else asks for another pipeline
            n_ranks = self.parallel_dims.non_data_parallel_size
            output.recorder.go_on(controller, n_ranks, emulation)
        else:
            device_name = self.device_memory_monitor.device_name
            output = open_output(
                self.job_config,
                self.parallel_dims,
                device_name,
                self._n_layers,
                count_trained(self.model_parts, self._n_copies),
            )
            output.recorder.begin(
                controller,
                emulation,
                flops_per_token=self.num_flops_per_token,
                peak_flops=self.gpu_peak_flops,
            )
        self._opened = output
        self.logger = output.logger

    @property
    def _n_copies(self) -> int:
        """How many processes hold each stage; an emulation has all stages in one."""
        return max(1, self.parallel_dims.world_size // self.parallel_dims.pp)

    def leave(self) -> RunOutput:
        """Write what is known so far, and give away what the run goes on with elsewhere."""
        self._note_peak_memory()
        output, self._opened = self._output, None
        if output.plots is not None:
            output.plots.close()  # files that it might read are about to get other names
            output.has_new_plots = True
        output.recorder.leave()
        return output

    def note_move(self, step: int, n_frozen: int, split: Sequence[int], seconds: float) -> None:
        """Take note of the move that brought the run here; as ``RunRecorder.note_move``."""
        self._output.recorder.note_move(step, n_frozen, split, seconds)
        self.time_last_log = time.perf_counter()

    def save_plan(
        self,
        plan: FreezePlan,
        bounds: DurationBounds,
        n_processors: float | None = None,
        sizes: Callable[[], ModelSizes] = lambda: UNKNOWN_SIZES,
    ) -> None:
        """Keep what was measured and what was solved; as ``RunRecorder.save_plan``."""
        self._output.recorder.save_plan(plan, bounds, n_processors, sizes)
        self._output.has_new_plots = True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's metrics and those of freezing; all ranks come here at the same steps."""
        ours = self._output.recorder.log(step, global_avg_loss, grad_norm)
        extra = {**(extra_metrics or {}), **ours}
        self._draw(step)
        self._warn_unless_finite(step, global_avg_loss, grad_norm)
        self._note_peak_memory()
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        kappa = self._output.recorder.latest_kappa
        self._output.progress.note(
            loss=global_avg_loss,
            tokens_per_second=tokens / seconds if seconds > 0.0 else None,
            gain=1 / kappa - 1 if kappa else None,
        )
        with self._output.progress.instead_of_upstream(), lines_count(self._unit, self._note):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def _draw(self, step: int) -> None:
        """Have what is new drawn; all ranks come here, of which the one that is shown draws."""
        if self._output.recorder.collect_timelines():
            self._output.has_new_plots = True
        if self._output.plots is None:
            return
        self._output.plots.show(step)
        # Drawing could hold up the actions that are timed on a CPU meanwhile.
        is_timed = self._controller is not None and self._controller.phase.monitors
        if self._output.has_new_plots and not is_timed:
            self._output.has_new_plots = False
            self._output.plots.draw()

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; all ranks come here, of which the one that is shown has the loss."""
        self._output.recorder.log_validation(step, loss, extra_metrics)
        self._note_peak_memory()
        with lines_count(self._unit):
            super().log_validation(loss, step, extra_metrics)

    def _warn_unless_finite(self, step: int, loss: float, grad_norm: float) -> None:
        phase = None if self._controller is None else self._controller.phase
        ratios = self._output.recorder.record.stage_ratios
        warning = self._output.watch.note(step, loss, grad_norm, phase, ratios)
        if warning is not None and self._output.is_shown:
            logger.warning(warning)

    def _note_peak_memory(self) -> None:
        """Remember the peak, which upstream resets whenever it has logged."""
        stats = titan_tools.device_module.memory_stats(self.device_memory_monitor.device)
        self._output.recorder.record.add_peak_memory(stats.get("reserved_bytes.all.peak", -1))

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Take note of a finished step."""
        self._output.recorder.end_step(step, seconds, n_tokens)
        self._output.progress.end_step(step, seconds, self._controller)

    def end_run(self, ended_early: str | None = None, device_seconds: float | None = None) -> None:
        """Gather what is still out, write the summary and show the report.

        Args:
            ended_early: Why the run ends before its last step; None if it does not.
            device_seconds: Of the whole run, parts before this one included.
        """
        self._note_peak_memory()
        summary, counts, text = self._output.recorder.end(ended_early, device_seconds)
        self._output.progress.close()
        if self._output.tensorboard is not None and self._output.is_shown:
            self._output.tensorboard.log_summary(summary)
        if self._output.is_shown and not self._is_quiet:
            with suppress(OSError):  # a terminal that is gone: the files tell
                print(shown_report(text), flush=True)
        if self._output.plots is not None:
            self._output.plots.finish(summary.steps_done)
        self._output.recorder.write_page(summary, counts)
        if self._output.is_shown and self._is_quiet:
            print(f"report: {self.run_folder / 'report.md'}", flush=True)

    def close(self) -> None:
        """Close what the run was shown and logged by, unless it goes on elsewhere."""
        if self._opened is not None:
            self._opened.close()


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
    note, n_steps = padding_note(job_config), job_config.training.steps
    progress = Progress(n_steps, shown=shows_progress, unit=unit, note=note)
    return RunOutput(is_shown, folder, recorder, progress, logger, tensorboard, plots)


def _both(first: BaseLogger, second: BaseLogger) -> BaseLogger:
    loggers = LoggerContainer()
    loggers.add_logger(first)
    loggers.add_logger(second)
    return loggers
