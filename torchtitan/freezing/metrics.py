"""Metrics of a run: upstream's figures, those of freezing, and the files that stay when it ends."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import torchtitan.components.metrics as titan_metrics
from timelyfreeze.bounds import DurationBounds, bounds_to_json
from timelyfreeze.controller import FreezeController
from timelyfreeze.order import order_to_csv
from timelyfreeze.phases import Phase
from timelyfreeze.plan import FreezePlan, plan_to_json
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor, TensorBoardLogger
from torchtitan.distributed import ParallelDims
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.progress import Progress
from torchtitan.freezing.report import RunReport
from torchtitan.freezing.run_folder import make_run_folder
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import NoColor

PHASE_NUMBERS = {phase: number for number, phase in enumerate(Phase)}


class RunTensorBoard(TensorBoardLogger):
    """TensorBoard files of one run.

    Figures that do not exist (MFU on a CPU) are left out, not drawn as NaN.
    """

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write the finite metrics."""
        known = {k: v for k, v in metrics.items() if not (isinstance(v, float) and math.isnan(v))}
        super().log(known, step)


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor with a folder per run, freezing figures, progress and a report.

    Every rank has one, since figures are gathered from all; only the rank that has the loss shows
    and writes.
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
        self._is_shown = dist.get_rank() == titan_metrics._get_metrics_rank(
            parallel_dims, job_config
        )
        self.run_folder = make_run_folder(job_config, create=self._is_shown)
        if not sys.stdout.isatty():
            self.color = NoColor()
        self._controller: FreezeController | None = None
        self._report = RunReport()
        self._progress = Progress(job_config.training.steps, shown=self._is_shown)
        if job_config.metrics.enable_tensorboard:
            self._open_tensorboard(job_config)

    def _open_tensorboard(self, job_config: JobConfig) -> None:
        all_ranks = job_config.metrics.save_for_all_ranks
        if not (self._is_shown or all_ranks):
            return
        folder = self.run_folder / f"rank_{dist.get_rank()}" if all_ranks else self.run_folder
        tensorboard = RunTensorBoard(str(folder))
        tensorboard.writer.add_text("settings", _as_table(job_config.to_dict()), 0)
        loggers = LoggerContainer()
        loggers.add_logger(self.logger)
        loggers.add_logger(tensorboard)
        self.logger = loggers

    def begin_run(self, controller: FreezeController | None) -> None:
        """Start showing and recording; ``controller`` is None for a run without freezing."""
        self._controller = controller
        self._write("settings.json", json.dumps(self.job_config.to_dict(), indent=2) + "\n")
        if controller is not None:
            self._write("schedule.csv", order_to_csv(controller.order))

    def save_plan(self, plan: FreezePlan, bounds: DurationBounds) -> None:
        """Keep what was measured and what was solved beside the run."""
        assert self._controller is not None
        self._write("schedule.csv", order_to_csv(self._controller.order))
        self._write("bounds.json", bounds_to_json(self._controller.dag, bounds))
        self._write("plan.json", plan_to_json(plan))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's figures and those of freezing; all ranks come here at the same steps."""
        extra = {**(extra_metrics or {}), **self._freezing_figures()}
        self._progress.log(step, global_avg_loss, grad_norm)
        with self._progress.instead_of_upstream():
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def _freezing_figures(self) -> dict[str, float]:
        controller = self._controller
        if controller is None:
            return {}
        figures = controller.collect()
        self._report.add_batches(figures)
        metrics: dict[str, float] = {
            "freezing/phase": PHASE_NUMBERS[controller.phase],
            "freezing/average_freeze_ratio": figures.average_freeze_ratio,
        }
        for stage, ratio in controller.expected_stage_ratios().items():
            metrics[f"freezing_expected_ratio/stage_{stage}"] = ratio
        for stage, ratio in figures.applied_stage_ratios.items():
            metrics[f"freezing_actual_ratio/stage_{stage}"] = ratio
        latest = figures.batch_ms.get(controller.phase)
        if latest:
            metrics["batch_time/measured(ms)"] = sorted(latest)[len(latest) // 2]
        predicted_ms = controller.expected_batch_ms()
        if predicted_ms is not None:
            metrics["batch_time/predicted(ms)"] = predicted_ms
        return metrics

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Take note of a finished step."""
        phase = None if self._controller is None else self._controller.phase
        self._report.add_step(phase, seconds, n_tokens)
        self._progress.step(step, phase)

    def end_run(self) -> None:
        """Gather what is still out and show the report."""
        if self._controller is not None:
            self._report.add_batches(self._controller.collect())
        text = self._report.render(
            self._controller, self.parallel_dims.non_data_parallel_size, self.run_folder
        )
        self._progress.close()
        self._write("report.txt", text)
        if self._is_shown:
            print(text, flush=True)

    def close(self) -> None:
        """Close the display and upstream's loggers."""
        self._progress.close()
        super().close()

    def _write(self, name: str, text: str) -> None:
        if self._is_shown:
            (self.run_folder / name).write_text(text)
            logger.debug("Wrote %s", self.run_folder / name)


def _as_table(settings: dict[str, Any]) -> str:
    """Return the settings as a markdown table, which TensorBoard's text tab renders."""
    rows = [
        f"| {section}.{key} | {value} |"
        for section, values in settings.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    return "\n".join(["| key | value |", "| --- | --- |", *rows])
