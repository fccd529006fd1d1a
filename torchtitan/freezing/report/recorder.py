"""Everything that a run writes down: the files of its folder, and the summary at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan.tools.logging import logger

from timelyfreeze.control import FreezeController, ObservedBatch
from timelyfreeze.planning import FreezePlan, plan_to_json
from timelyfreeze.records import (
    COUNTS,
    RESPONSES,
    AccuracyRow,
    FrozenCount,
    Move,
    RunSummary,
    never_updated,
    summary_to_json,
)
from timelyfreeze.runtime import Exchange
from timelyfreeze.schedule import order_to_csv
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds
from timelyfreeze.whatif.bounds_file import bounds_file_text
from timelyfreeze.whatif.loads import UNKNOWN_SIZES, ModelSizes
from torchtitan.freezing.config import JobConfig, pipeline_notes, preset_line
from torchtitan.freezing.emulation.record import EmulationRecord
from torchtitan.freezing.report.batches import ResponseSample, TimelineRecord
from torchtitan.freezing.report.page import render_page
from torchtitan.freezing.report.run_folder import REPORT, OutputGuard, number_former
from torchtitan.freezing.report.run_record import (
    RunRecord,
    with_convergence,
    with_cost,
    with_utilization,
)
from torchtitan.freezing.report.step_record import (
    FrontRecord,
    LossCurve,
    MoveRecord,
    StepRecord,
    add_accuracies,
    read_reference,
)
from torchtitan.freezing.report.tensorboard import elastic_metrics, logged_metrics
from torchtitan.freezing.report.text import render_report

# What is of one pipeline, by what is numbered together: where another one follows, it stays.
_OF_A_PIPELINE = (
    ("schedule.csv", "responses.csv"),
    ("bounds.json", "plan.json"),
    *((f"timelines/measured_{phase.value}.json",) for phase in Phase if phase is not Phase.WARMUP),
)


class RunRecorder:
    """Collects what a run tells of itself, on every rank, and writes it on the one that is shown.

    A run that moves to another pipeline goes on with the same one.

    Args:
        job_config: The run's configuration.
        start: What is known of the run before its first step.
        folder: Of the run.
        guard: What files are written in.
        writes: Whether this rank writes.
        n_layers: Layers of the model; None for a model that does not count them.

    Attributes:
        record: What this process has seen of its run.
    """

    def __init__(
        self,
        job_config: JobConfig,
        start: RunSummary,
        folder: Path,
        guard: OutputGuard,
        *,
        writes: bool,
        n_layers: int | None,
    ) -> None:
        self.record = RunRecord()
        self._config = job_config
        self._start = start
        self._ranks_per_replica = start.ranks_per_replica
        self._folder = folder
        self._guard = guard
        self._writes = writes
        self._n_layers = n_layers
        self._controller: FreezeController | None = None
        self._emulation: EmulationRecord | None = None
        self._flops = math.nan, math.nan
        self._timelines: TimelineRecord | None = None
        self._front: FrontRecord | None = None
        self._responses = ResponseSample()
        self._logged_loss: float | None = None
        self._loss_curve = LossCurve(folder / "losses.csv") if writes else None
        self._steps = StepRecord(
            folder if writes else None,
            emulates=job_config.emulation.enable,
            writing=guard.writing,
        )
        self._moves = MoveRecord(folder if writes else None, guard.writing)
        name = job_config.report.reference_run
        # Read before the run, so that what becomes of it meanwhile does no harm.
        self._reference = read_reference(Path(name)) if name is not None and writes else None

    @property
    def latest_kappa(self) -> float | None:
        """Time of a step over that of an unfrozen one; None before freezing began."""
        return self._steps.latest_kappa

    def begin(
        self,
        controller: FreezeController | None,
        emulation: EmulationRecord | None = None,
        *,
        flops_per_token: float = math.nan,
        peak_flops: float = math.nan,
    ) -> None:
        """Begin to record.

        Args:
            controller: None for a run without freezing.
            emulation: None where every rank has its own process.
            flops_per_token: That the model needs, forward and backward.
            peak_flops: Of a device, each second; NaN where it is not known.
        """
        self._flops = flops_per_token, peak_flops
        self._emulation = emulation
        if self._writes and (told := preset_line(self._config)) is not None:
            logger.info(told)
        self._write("settings.json", json.dumps(self._config.to_dict(), indent=2) + "\n")
        if controller is not None:
            if self._writes:
                caches = controller.cache is not None
                self._front = FrontRecord(self._folder, caches=caches, writing=self._guard.writing)
            self._follow(controller)

    def _follow(self, controller: FreezeController) -> None:
        """Begin to look on at a controller, and so at a pipeline."""
        self._controller = controller
        self._timelines = TimelineRecord(
            controller,
            Exchange(),
            self._folder,
            writes=self._writes,
            writing=self._guard.writing,
        )
        controller.on_batch = self._add_batch
        self._write("schedule.csv", order_to_csv(controller.order))

    def leave(self) -> None:
        """Write what is known of a pipeline, and let go of it; every rank comes here."""
        if self._controller is not None:
            self._gather(self._controller)
        self.collect_timelines(is_last=True)
        if self._emulation is not None:
            self._emulation.collect()
            self._take_virtual(self._emulation)
        self._steps.close()
        self._controller = self._timelines = None  # room for the next pipeline

    def go_on(
        self,
        controller: FreezeController,
        ranks_per_replica: int,
        emulation: EmulationRecord | None = None,
    ) -> None:
        """Record the same run in another pipeline.

        Args:
            controller: Its controller.
            ranks_per_replica: Processes that now share a batch.
            emulation: As for ``begin``.
        """
        self._ranks_per_replica = ranks_per_replica
        if self._emulation is not None and emulation is not None:
            emulation.go_on_from(self._emulation)
        self._emulation = emulation
        self.record.begin_pipeline()
        self._steps.begin_pipeline()
        self._responses = ResponseSample()
        if self._writes:
            with self._guard.writing():
                for names in _OF_A_PIPELINE:
                    number_former(self._folder, names)
        self._follow(controller)

    def note_move(self, step: int, n_frozen: int, split: Sequence[int], seconds: float) -> None:
        """Take note of a move that is over.

        Args:
            step: First one in the new pipeline.
            n_frozen: Layers that are frozen.
            split: Layers on each of its ranks.
            seconds: What the move took.
        """
        layers = " ".join(map(str, split))
        self._moves.add(Move(step, n_frozen, len(split), self._n_replicas, layers, seconds))

    @property
    def _n_replicas(self) -> int:
        return self._n_held if self._emulation is None else self._emulation.n_replicas

    @property
    def _n_held(self) -> int:
        """How often the processes together hold the model."""
        return self._start.n_devices // self._ranks_per_replica

    def _add_batch(self, observed: ObservedBatch) -> None:
        self._responses.add(observed)
        if self._timelines is not None:
            self._timelines.add(observed)
        if self._front is not None:
            self._front.add_batch(observed)

    def save_plan(
        self,
        plan: FreezePlan,
        bounds: DurationBounds,
        n_processors: float | None = None,
        sizes: Callable[[], ModelSizes] = lambda: UNKNOWN_SIZES,
    ) -> None:
        """Keep what was measured and what was solved beside the run.

        What an earlier plan was made from, and that plan, get a number and stay. The last two
        arguments are as for ``pipeline_notes``; sizes are counted where they are written alone.
        """
        assert self._controller is not None  # nothing else has plans to save
        order = self._controller.order
        self.record.begin_plan()
        if self._writes:
            notes = pipeline_notes(self._config, order, self._n_layers, n_processors, sizes())
            number_former(self._folder, ("bounds.json", "plan.json"))
            self._write("schedule.csv", order_to_csv(order))
            self._write("bounds.json", bounds_file_text(self._controller.dag, bounds, notes))
            self._write("plan.json", plan_to_json(plan))
        if self._timelines is not None:
            self._timelines.begin_plan()

    def log(self, step: int, loss: float, grad_norm: float) -> dict[str, float]:
        """Take note of a logged step and return its metrics of freezing, by tag.

        All ranks come here at the same steps.
        """
        controller, extra = self._controller, {}
        if controller is None:
            self._steps.log(step, loss)
        else:
            # What undoes the clipping of gradients.
            max_norm, is_finite = self._config.training.max_norm, math.isfinite(grad_norm)
            metrics = controller.collect(max(1.0, grad_norm / max_norm) if is_finite else None)
            self.record.add_batches(metrics)
            if self._front is not None:
                self._front.write()
            predicted_ms = controller.expected_batch_ms()
            of_run = replace(metrics, cache=self.record.cache)
            extra |= logged_metrics(controller, of_run, predicted_ms)
            if self._config.freezing.elastic.enable:
                extra |= elastic_metrics(controller.order.n_ranks, self._n_replicas)
            extra |= self._steps.log(
                step, loss, controller.phase, metrics, predicted_ms, self._n_held
            )
        if self._emulation is not None:
            extra |= self._emulation.metrics()
            self._take_virtual(self._emulation)
        self.record.add_loss(step, loss)
        self._logged_loss = loss
        return extra

    def _take_virtual(self, emulation: EmulationRecord) -> None:
        """Take note of steps whose time by the virtual clock is known now."""
        steps = emulation.take_steps()
        self._steps.add_virtual(steps)
        for _, virtual_ms in steps:
            self._moves.add_step(virtual_ms / 1e3)

    def collect_timelines(self, *, is_last: bool = False) -> bool:
        """Write timelines of phases that are over, on all ranks; return whether there was one."""
        return self._timelines is not None and self._timelines.collect(is_last=is_last)

    def log_validation(
        self, step: int, loss: float, scores: Mapping[str, float] | None = None
    ) -> None:
        """Take note of a validation, and of what it counted besides."""
        self.record.add_validation(loss, scores or {})
        if self._loss_curve is not None:
            with self._guard.writing():
                self._loss_curve.add_validation(step, self.record.seconds, loss)
                if (counted := self.record.accuracies) is not None:
                    add_accuracies(self._folder, AccuracyRow(step, self.record.seconds, *counted))

    def end_step(self, step: int, seconds: float, n_tokens: int) -> None:
        """Take note of a finished step."""
        phase = None if self._controller is None else self._controller.phase
        of_device = n_tokens / self._ranks_per_replica
        self.record.add_step(step, phase, seconds, of_device)
        self._steps.end_step(step, phase, seconds, self.record.seconds, of_device)
        if self._emulation is None:
            self._moves.add_step(seconds)
        checks = None if self._controller is None else self._controller.checks
        if self._front is not None:
            self._front.end_step(None if checks is None else checks.decision)
        if self._emulation is not None:
            self._emulation.end_step(phase, n_tokens)
        # A loss is logged before its step has ended and its time is known.
        if self._loss_curve is not None and self._logged_loss is not None:
            with self._guard.writing():
                self._loss_curve.add_train(step, self.record.seconds, self._logged_loss)
        self._logged_loss = None

    def end(
        self, ended_early: str | None, device_seconds: float | None = None
    ) -> tuple[RunSummary, list[FrozenCount], str]:
        """Gather what is still out and write all but the page; every rank comes here.

        Args:
            ended_early: Why the run ends before its last step; None if it does not.
            device_seconds: Of the whole run, parts before this one included.

        Returns:
            The summary, how often each tensor was frozen, and the short report.
        """
        counts: list[FrozenCount] = []
        if self._controller is not None:
            self._gather(self._controller)
            counts = self._controller.frozen_counts()
            if self._writes:
                with self._guard.writing():
                    COUNTS.write(self._folder, counts)
        self.collect_timelines(is_last=True)
        peaks = Exchange().all_gather(self.record.peak_memory_gib)
        peak_memory_gib = max((peak for peak in peaks if peak is not None), default=None)
        emulated = None
        if self._emulation is not None:
            emulated = self._emulation.summarize(freezes=self._controller is not None)
            self._take_virtual(self._emulation)
        self._steps.close()
        summary = self.record.summarize(self._start, self._controller, peak_memory_gib, emulated)
        summary = with_convergence(summary, self._steps.p_eff, never_updated(counts))
        summary = with_utilization(summary, *self._flops)
        if self._reference is not None:
            summary = replace(summary, **self._reference.compared(self._folder))
        if self._config.freezing.elastic.enable and self._controller is not None:
            n_moves, seconds = len(self._moves.timed()), self._moves.seconds
            summary = replace(summary, moves=n_moves, moves_seconds=seconds)
        summary = replace(summary, ended_early=ended_early)
        if device_seconds is not None and self._emulation is None:
            summary = with_cost(summary, device_seconds, self._config.report.device_hour_price)
        text = render_report(summary, self._folder, self._moves.timed())
        self._write("summary.json", summary_to_json(summary))
        self._write(REPORT, text)
        return summary, counts, text

    def write_page(self, summary: RunSummary, counts: list[FrozenCount]) -> None:
        """Write the page, which lists the files that are there."""
        moves = self._moves.timed()
        page = render_page(summary, self._config.to_dict(), self._folder, counts, moves)
        self._write("report.md", page)

    def _gather(self, controller: FreezeController) -> None:
        """Gather what has not been logged, and samples of backwards; all ranks come here."""
        metrics = controller.collect()
        self.record.add_batches(metrics)
        self._steps.add_ratios(metrics)
        if self._front is not None:
            self._front.write()
        everyone = Exchange().all_gather(self._responses.by_stage())
        by_stage = {stage: rows for rank in reversed(everyone) for stage, rows in rank.items()}
        if self._writes:
            rows = [row for _, of_stage in sorted(by_stage.items()) for row in of_stage]
            with self._guard.writing():
                RESPONSES.write(self._folder, rows)

    def close(self) -> None:
        """Write what is still out."""
        self._steps.close()
        if self._front is not None:
            self._front.write()

    def _write(self, name: str, text: str) -> None:
        if self._writes:
            with self._guard.writing():
                (self._folder / name).write_text(text)
            logger.debug("Wrote %s", self._folder / name)
