"""Metrics of a run: upstream's metrics, those of freezing, and the files that stay when it ends."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.utils as titan_tools
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

from timelyfreeze.control import FreezeController, ObservedBatch
from timelyfreeze.planning import FreezePlan, plan_to_json
from timelyfreeze.records import (
    FrozenCount,
    never_updated,
    summary_to_json,
    write_counts,
    write_responses,
)
from timelyfreeze.records import steps as run_steps
from timelyfreeze.runtime import Exchange
from timelyfreeze.schedule import order_to_csv
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds
from timelyfreeze.whatif.bounds_file import bounds_file_text
from torchtitan.freezing.config import JobConfig, pipeline_notes
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report.finite_watch import FiniteWatch
from torchtitan.freezing.report.logged_metrics import logged_metrics
from torchtitan.freezing.report.loss_curve import LossCurve
from torchtitan.freezing.report.output_guard import OutputGuard
from torchtitan.freezing.report.page import render_page
from torchtitan.freezing.report.plots import RunPlots
from torchtitan.freezing.report.progress import Progress
from torchtitan.freezing.report.reference import read_reference, seconds_to_loss_of
from torchtitan.freezing.report.response_sample import ResponseSample
from torchtitan.freezing.report.run_folder import make_run_folder, number_former
from torchtitan.freezing.report.run_record import (
    RunRecord,
    summary_at_start,
    with_convergence,
    with_reference,
)
from torchtitan.freezing.report.status import Pace, Status
from torchtitan.freezing.report.step_record import StepRecord
from torchtitan.freezing.report.tensorboard import RunTensorBoard
from torchtitan.freezing.report.text import render_report
from torchtitan.freezing.report.timelines import TimelineRecord


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor with a folder per run, freezing metrics, progress and a report.

    Every rank has one, since metrics are gathered from all; only the rank that has the loss shows
    and writes.

    Attributes:
        run_folder: Where the rank that is shown writes.
        batch_listeners: Called one after the other with each pass of this rank, once its times are
            read, which is where metrics are logged or compared; oldest first. A run without
            freezing has no batches to tell of.
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
        self._n_layers: int | None = getattr(args[0], "n_layers", None) if args else None
        self._is_shown = dist.get_rank() == titan_metrics._get_metrics_rank(
            parallel_dims, job_config
        )
        self.run_folder = make_run_folder(job_config, create=self._is_shown)
        if not sys.stdout.isatty():
            self.color = NoColor()
        self.batch_listeners: list[Callable[[ObservedBatch], None]] = []
        self._controller: FreezeController | None = None
        self._emulation: EmulationRecord | None = None
        self._record = RunRecord()
        self._start = summary_at_start(
            job_config,
            parallel_dims,
            self.device_memory_monitor.device_name,
            titan_tools.device_type,
        )
        self._guard = OutputGuard(self.run_folder)
        self._watch = FiniteWatch()
        self._loss_curve = LossCurve(self.run_folder / "losses.csv") if self._is_shown else None
        step_log = run_steps.StepLog(self.run_folder / run_steps.STEPS_FILE) if self._is_shown else None
        self._steps = StepRecord(
            step_log,
            self._start.ranks_per_replica,
            emulates=job_config.emulation.enable,
            writing=self._guard.writing,
        )
        self._responses = ResponseSample()
        self.batch_listeners.append(self._responses.add)
        self._logged_loss: float | None = None
        self._timelines: TimelineRecord | None = None
        self._has_new_plots = False
        self._is_quiet = job_config.report.quiet
        self._progress = Progress(
            job_config.training.steps, shown=self._is_shown and not self._is_quiet
        )
        self._status = Status()
        self._pace = Pace(job_config.training.steps)
        name = job_config.report.reference_run
        # Read before the run, so that what becomes of it meanwhile does no harm.
        self._reference = (
            read_reference(Path(name)) if name is not None and self._is_shown else None
        )
        self._tensorboard: RunTensorBoard | None = None
        if job_config.metrics.enable_tensorboard:
            self._open_tensorboard(job_config)
        self._plots: RunPlots | None = None
        if self._is_shown and job_config.plots.enable:
            board = self._tensorboard
            self._plots = RunPlots(self.run_folder, None if board is None else board.writer)

    def _open_tensorboard(self, job_config: JobConfig) -> None:
        all_ranks = job_config.metrics.save_for_all_ranks
        if not (self._is_shown or all_ranks):
            return
        folder = self.run_folder / f"rank_{dist.get_rank()}" if all_ranks else self.run_folder
        self._tensorboard = RunTensorBoard(str(folder), job_config, self._guard)
        loggers = LoggerContainer()
        loggers.add_logger(self.logger)
        loggers.add_logger(self._tensorboard)
        self.logger = loggers

    def begin_run(
        self, controller: FreezeController | None, emulation: EmulationRecord | None = None
    ) -> None:
        """Start showing and recording.

        Args:
            controller: None for a run without freezing.
            emulation: None where every rank has its own process.
        """
        self._controller = controller
        self._emulation = emulation
        self._write("settings.json", json.dumps(self.job_config.to_dict(), indent=2) + "\n")
        if controller is not None:
            self._timelines = TimelineRecord(
                controller,
                Exchange(),
                self.run_folder,
                writes=self._is_shown,
                writing=self._guard.writing,
            )
            self.batch_listeners.append(self._timelines.add)
            controller.on_batch = self._tell_listeners
            self._write("schedule.csv", order_to_csv(controller.order))

    def _tell_listeners(self, observed: ObservedBatch) -> None:
        for listener in self.batch_listeners:
            listener(observed)

    def save_plan(
        self, plan: FreezePlan, bounds: DurationBounds, n_processors: float | None = None
    ) -> None:
        """Keep what was measured and what was solved beside the run.

        What an earlier plan was made from, and that plan, get a number and stay.
        """
        assert self._controller is not None
        order = self._controller.order
        notes = pipeline_notes(self.job_config, order, self._n_layers, n_processors)
        self._write("schedule.csv", order_to_csv(order))
        self._record.begin_plan()
        if self._is_shown:
            number_former(self.run_folder, ("bounds.json", "plan.json"))
        self._write("bounds.json", bounds_file_text(self._controller.dag, bounds, notes))
        self._write("plan.json", plan_to_json(plan))
        self._has_new_plots = True
        if self._timelines is not None:
            self._timelines.begin_plan()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's metrics and those of freezing; all ranks come here at the same steps."""
        extra = {**(extra_metrics or {})}
        if self._controller is None:
            self._steps.log(step, global_avg_loss)
        else:
            extra.update(self._freezing_metrics(step, global_avg_loss, grad_norm))
        if self._emulation is not None:
            extra.update(self._emulation.metrics())
            self._steps.add_virtual(self._emulation.take_steps())
        self._draw(step)
        self._record.add_loss(step, global_avg_loss)
        self._logged_loss = global_avg_loss
        self._warn_unless_finite(step, global_avg_loss, grad_norm)
        self._note_peak_memory()
        self._update_status(global_avg_loss)
        with self._progress.instead_of_upstream():
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def _draw(self, step: int) -> None:
        """Have what is new drawn; all ranks come here, of which the one that is shown draws."""
        if self._timelines is not None and self._timelines.collect():
            self._has_new_plots = True
        if self._plots is None:
            return
        self._plots.show(step)
        # Drawing could hold up the actions that are timed on a CPU meanwhile.
        is_timed = self._controller is not None and self._controller.phase.monitors
        if self._has_new_plots and not is_timed:
            self._has_new_plots = False
            self._plots.draw()

    def _update_status(self, loss: float) -> None:
        """Take note of what is shown until the next logged step."""
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        kappa = self._steps.latest_kappa
        self._status = replace(
            self._status,
            loss=loss,
            tokens_per_second=tokens / seconds if seconds > 0.0 else None,
            gain=1 / kappa - 1 if kappa else None,
        )

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; all ranks come here, of which the one that is shown has the loss."""
        self._record.add_validation_loss(loss)
        if self._loss_curve is not None:
            with self._guard.writing():
                self._loss_curve.add_validation(step, self._record.seconds, loss)
        self._note_peak_memory()
        super().log_validation(loss, step, extra_metrics)

    def _warn_unless_finite(self, step: int, loss: float, grad_norm: float) -> None:
        phase = None if self._controller is None else self._controller.phase
        warning = self._watch.note(step, loss, grad_norm, phase, self._record.stage_ratios)
        if warning is not None and self._is_shown:
            logger.warning(warning)

    def _note_peak_memory(self) -> None:
        """Remember the peak, which upstream resets whenever it has logged."""
        stats = titan_tools.device_module.memory_stats(self.device_memory_monitor.device)
        self._record.add_peak_memory(stats.get("reserved_bytes.all.peak", -1))

    def _freezing_metrics(self, step: int, loss: float, grad_norm: float) -> dict[str, float]:
        controller = self._controller
        assert controller is not None  # the caller saw to it
        metrics = controller.collect(self._gradient_scale(grad_norm))
        self._record.add_batches(metrics)
        predicted_ms = controller.expected_batch_ms()
        return {
            **logged_metrics(controller, metrics, predicted_ms),
            **self._steps.log(step, loss, controller.phase, metrics, predicted_ms),
        }

    def _gradient_scale(self, grad_norm: float) -> float | None:
        """Return what undoes the clipping of gradients; None where there is nothing to measure."""
        if not math.isfinite(grad_norm):
            return None
        return max(1.0, grad_norm / self.job_config.training.max_norm)

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Take note of a finished step."""
        phase = None if self._controller is None else self._controller.phase
        self._record.add_step(step, phase, seconds, n_tokens)
        self._steps.end_step(step, phase, seconds, self._record.seconds, n_tokens)
        if self._emulation is not None:
            self._emulation.add_step(phase, seconds, n_tokens)
        # A loss is logged before its step has ended and its time is known.
        if self._loss_curve is not None and self._logged_loss is not None:
            with self._guard.writing():
                self._loss_curve.add_train(step, self._record.seconds, self._logged_loss)
        self._logged_loss = None
        self._status = self._pace.add(
            replace(self._status, phase=phase, steps_left_in_phase=self._steps_left(step)),
            step,
            seconds,
        )
        self._progress.show(step, self._status)

    def _steps_left(self, step: int) -> int | None:
        """Return how many steps the phase lasts; None for one that lasts to the end."""
        controller = self._controller
        if controller is None or controller.phase in (Phase.STABLE, Phase.OFF):
            return None
        return controller.settings.phases.last_step_of(controller.phase) - step

    def end_run(self, ended_early: str | None = None) -> None:
        """Gather what is still out, write the summary and show the report.

        Args:
            ended_early: Why the run ends before its last step; None if it does not.
        """
        counts: list[FrozenCount] = []
        if self._controller is not None:
            metrics = self._controller.collect()
            self._record.add_batches(metrics)
            self._steps.add_ratios(metrics)
            counts = self._save_frozen(self._controller)
        if self._timelines is not None:
            self._timelines.collect(is_last=True)
        self._note_peak_memory()
        peaks = Exchange().all_gather(self._record.peak_memory_gib)
        peak_memory_gib = max((peak for peak in peaks if peak is not None), default=None)
        emulated = None
        if self._emulation is not None:
            emulated = self._emulation.summarize(freezes=self._controller is not None)
            self._steps.add_virtual(self._emulation.take_steps())
        self._steps.close()
        summary = self._record.summarize(self._start, self._controller, peak_memory_gib, emulated)
        summary = with_convergence(summary, self._steps.p_eff, never_updated(counts))
        if self._reference is not None:
            reached = seconds_to_loss_of(self._reference, self.run_folder)
            summary = with_reference(summary, self._reference, reached)
        summary = replace(summary, ended_early=ended_early)
        text = render_report(summary, self.run_folder)
        self._progress.close()
        self._write("summary.json", summary_to_json(summary))
        if self._tensorboard is not None and self._is_shown:
            self._tensorboard.log_summary(summary)
        self._write("report.txt", text)
        if self._is_shown and not self._is_quiet:
            print(text, flush=True)
        if self._plots is not None:
            self._plots.finish(summary.steps_done)
        page = render_page(summary, self.job_config.to_dict(), self.run_folder, counts)
        self._write("report.md", page)
        if self._is_shown and self._is_quiet:
            print(f"report: {self.run_folder / 'report.md'}", flush=True)

    def _save_frozen(self, controller: FreezeController) -> list[FrozenCount]:
        """Write how often each tensor was frozen and what that saved; all ranks come here."""
        counts = controller.frozen_counts()
        everyone = Exchange().all_gather(self._responses.by_stage())
        by_stage = {stage: rows for rank in reversed(everyone) for stage, rows in rank.items()}
        if self._is_shown:
            rows = [row for _, of_stage in sorted(by_stage.items()) for row in of_stage]
            with self._guard.writing():
                write_counts(self.run_folder, counts)
                write_responses(self.run_folder, rows)
        return counts

    def close(self) -> None:
        """Close the display and upstream's loggers."""
        self._steps.close()
        if self._plots is not None:
            self._plots.close()
        self._progress.close()
        super().close()

    def _write(self, name: str, text: str) -> None:
        if self._is_shown:
            with self._guard.writing():
                (self.run_folder / name).write_text(text)
            logger.debug("Wrote %s", self.run_folder / name)
