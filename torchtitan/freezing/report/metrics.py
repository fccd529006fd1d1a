"""Upstream's metrics processor with the parts of a run: metrics of freezing, progress, a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import NoColor

from timelyfreeze.control import FreezeController
from timelyfreeze.planning import FreezePlan
from timelyfreeze.records import Move
from timelyfreeze.timing import DurationBounds
from torchtitan.freezing.config import JobConfig, model_family, padding_note
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report.recorder import RunRecorder, open_recorder
from torchtitan.lora.adapters import count_trained
from torchtitan.upstream.fixes import lines_count


class FreezingMetricsProcessor(MetricsProcessor):
    """Upstream's metrics processor with a folder per run, freezing metrics, progress and a report.

    Every rank has one, since metrics are gathered from all; only the rank that has the loss shows
    and writes. There is nothing to write to before :meth:`begin_run`.
    """

    recorder: RunRecorder | None = None  # None as well once the run goes on elsewhere

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, *args: Any, **kwargs: Any
    ) -> None:
        without_loggers = replace(job_config.metrics, enable_tensorboard=False, enable_wandb=False)
        super().__init__(replace(job_config, metrics=without_loggers), parallel_dims)
        self.job_config = job_config
        if not sys.stdout.isatty():
            self.color = NoColor()
        self._unit = model_family(job_config).unit
        self._note = padding_note(job_config)
        self._n_layers = getattr(args[0], "n_layers", None) if args else None

    @property
    def run_folder(self) -> Path:
        """Where the rank that is shown writes."""
        return self._known.run.folder

    @property
    def _known(self) -> RunRecorder:
        assert self.recorder is not None  # there is nothing to tell before the run begins
        return self.recorder

    def begin_run(
        self,
        controller: FreezeController | None,
        emulation: EmulationRecord | None = None,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Start showing and recording, as ``RunRecorder.begin_pipeline``.

        The recorder is that of a run that goes on here, in another pipeline; None for a new one.
        """
        dims = self.parallel_dims
        if recorder is None:
            n_copies = max(1, dims.world_size // dims.pp)  # an emulation has all stages in one
            recorder = open_recorder(
                self.job_config,
                dims,
                self.device_memory_monitor,
                self._n_layers,
                count_trained(self.model_parts, n_copies),
                flops_per_token=self.num_flops_per_token,
                peak_flops=self.gpu_peak_flops,
            )
        recorder.begin_pipeline(controller, emulation, dims.non_data_parallel_size)
        self.recorder = recorder
        self.logger = recorder.logger

    def leave(self) -> RunRecorder:
        """Write what is known so far, and give away what the run goes on with elsewhere."""
        recorder, self.recorder = self._known, None
        recorder.leave()
        return recorder

    def note_move(self, step: int, n_frozen: int, split: Sequence[int], seconds: float) -> None:
        """Take note of the move that brought the run here, as in ``moves.csv``."""
        layers, n_replicas = " ".join(map(str, split)), self._known.run.n_replicas
        for part in self._known.parts:
            part.move(Move(step, n_frozen, len(split), n_replicas, layers, seconds))
        self.time_last_log = time.perf_counter()

    def save_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Keep what was measured and what was solved; ``about`` as ``RunPart.begin_plan``."""
        for part in self._known.parts:
            part.begin_plan(plan, bounds, **about)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log upstream's metrics and those of freezing; all ranks come here at the same steps."""
        ours = self._known.log_step(step, global_avg_loss, grad_norm)
        extra = {**(extra_metrics or {}), **ours}
        seconds = time.perf_counter() - self.time_last_log
        tokens = self.ntokens_since_last_log / self.parallel_dims.non_data_parallel_size
        progress = self._known.progress
        progress.note(global_avg_loss, tokens / seconds if seconds > 0.0 else None)
        with progress.instead_of_upstream(), lines_count(self._unit, self._note):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; all ranks come here, of which the one that is shown has the loss."""
        for part in self._known.parts:
            part.log_validation(step, loss, extra_metrics or {})
        with lines_count(self._unit, self._note):
            super().log_validation(loss, step, extra_metrics)

    def close(self) -> None:
        """Close what the run was shown and logged by, unless it goes on elsewhere."""
        if self.recorder is not None:
            self.recorder.close()
