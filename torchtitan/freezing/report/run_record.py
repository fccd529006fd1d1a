"""What a process saw of its run, collected step by step and summed up at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed import ParallelDims

from timelyfreeze.control import CollectedMetrics, FreezeController
from timelyfreeze.front.caching import CacheUse, use_of_parts
from timelyfreeze.records import (
    SKIPPED_STEPS,
    UNFROZEN_PHASES,
    NeverUpdated,
    RunSummary,
    kappa_error,
    kappa_over_p_eff,
)
from timelyfreeze.settings import Phase
from timelyfreeze.timing import usable_cores
from torchtitan.data.rows.messages import has_rows
from torchtitan.freezing.config import JobConfig, model_family
from torchtitan.freezing.report.text import by_virtual_clock

# What a validation of pictures counts besides its loss.
_SCORES = {f"validation_{name}": f"validation_metrics/{name}" for name in ("top1", "top5")}
_MIB = 1024**2
_GIB = 1024**3


class RunRecord:
    """Collects step times, batch times, losses and memory of this process's run.

    A resumed run records its own part only.

    Attributes:
        seconds: Sum of the step times so far, without validation and checkpoints.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._step_seconds: dict[Phase | None, list[float]] = {}
        self._knows_unfrozen = False  # from a pipeline that was left
        self._n_tokens = 0.0
        self._n_steps = 0
        self._last_step = 0
        self._batch_ms: dict[Phase, list[float]] = {}
        self._drift: list[float] = []
        self._metrics: CollectedMetrics | None = None
        self._former_cache: CacheUse | None = None
        self._score_ms = 0.0
        self._n_steps_collected = 0
        self._losses: list[tuple[int, float]] = []
        self._validation: dict[str, float] = {}
        self._peak_bytes = -1

    @property
    def peak_memory_gib(self) -> float | None:
        """Largest memory use noted so far on this rank; None where the device tells none."""
        return None if self._peak_bytes < 0 else self._peak_bytes / _GIB

    @property
    def stage_ratios(self) -> Mapping[int, float] | None:
        """What the masks of the last logged step froze of each stage; None before."""
        return None if self._metrics is None else self._metrics.applied_stage_ratios

    @property
    def cache(self) -> CacheUse | None:
        """What the run had of the cache of a frozen front, in all its pipelines; None without."""
        return use_of_parts(self._former_cache, self._metrics and self._metrics.cache)

    def add_step(self, step: int, phase: Phase | None, seconds: float, n_tokens: float) -> None:
        """Take note of a finished optimizer step, which took ``n_tokens`` for each device."""
        if not (self._knows_unfrozen and phase in UNFROZEN_PHASES):
            self._step_seconds.setdefault(phase, []).append(seconds)
        self.seconds += seconds
        self._n_tokens += n_tokens
        self._n_steps += 1
        self._last_step = step

    def add_batches(self, metrics: CollectedMetrics) -> None:
        """Take note of measured batches."""
        for phase, batch_ms in metrics.batch_ms.items():
            self._batch_ms.setdefault(phase, []).extend(batch_ms)
        if metrics.drift is not None:
            self._drift.append(metrics.drift)
        if metrics.score_ms_per_step is not None:
            n_steps = self._n_steps - self._n_steps_collected
            self._score_ms += n_steps * metrics.score_ms_per_step
        self._n_steps_collected = self._n_steps
        self._metrics = metrics

    def begin_plan(self) -> None:
        """Forget batches of the stable phase: they ran under another plan than the one to come."""
        self._batch_ms.pop(Phase.STABLE, None)
        self._drift.clear()

    def begin_pipeline(self) -> None:
        """Forget steps and batches of another pipeline, but the unfrozen steps of the first.

        Without a plan its unfrozen batches stay too, since no others are to come.
        """
        self._drift.clear()
        self._batch_ms = {p: ms for p, ms in self._batch_ms.items() if p is Phase.WARMUP}
        before = {p: s for p, s in self._step_seconds.items() if p in UNFROZEN_PHASES}
        self._step_seconds, self._knows_unfrozen = before, bool(before)
        self._former_cache = self.cache
        if self._metrics is not None:
            self._metrics = replace(self._metrics, cache=None)

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Top-1 and top-5 of the last validation; None where it counted none."""
        top1, top5 = (self._validation.get(field) for field in _SCORES)
        return None if top1 is None or top5 is None else (top1, top5)

    def add_loss(self, step: int, loss: float) -> None:
        """Take note of a logged training loss."""
        self._losses.append((step, loss))

    def add_validation(self, loss: float, scores: Mapping[str, float]) -> None:
        """Take note of a validation and of what it counted besides; the last one counts."""
        self._validation = {"validation_loss": loss} | {
            field: scores[metric] for field, metric in _SCORES.items() if metric in scores
        }

    def add_peak_memory(self, n_bytes: int) -> None:
        """Take note of a peak, before the device starts a new one; -1 stands for unknown."""
        self._peak_bytes = max(self._peak_bytes, n_bytes)

    def summarize(
        self,
        start: RunSummary,
        controller: FreezeController | None,
        peak_memory_gib: float | None,
        emulated: Mapping[str, Any] | None = None,
    ) -> RunSummary:
        """Return ``start`` with everything that was measured filled in.

        Args:
            start: What was known when the run began, of :func:`summary_at_start`.
            controller: The run's controller, or None if nothing was frozen by design.
            peak_memory_gib: Largest of all ranks.
            emulated: Fields that an emulation has measured by its own clock.
        """
        before_ms = self._median_step_ms(UNFROZEN_PHASES)
        after_ms = self._median_step_ms([None] if controller is None else [Phase.STABLE])
        measured: dict[str, Any] = {
            "steps_done": self._last_step,
            "tokens_per_second_unfrozen": self._speed(before_ms),
            "tokens_per_second": self._speed(after_ms),
            "step_ms_unfrozen": before_ms,
            "step_ms": after_ms,
            "step_ms_off": self._median_step_ms([Phase.OFF]),
            "batch_ms_unfrozen": self._median_batch_ms([Phase.UPPER_BOUND, Phase.WARMUP]),
            "batch_ms": self._median_batch_ms([Phase.STABLE]),
            "drift": statistics.median(self._drift) if self._drift else None,
            "train_loss": self._train_loss(),
            "last_loss": self._losses[-1][1] if self._losses else None,
            **self._validation,
            "seconds": self.seconds,
            "peak_memory_gib": peak_memory_gib,
            **(emulated or {}),
        }
        if controller is not None and emulated is None:
            before, after = self._warm(UNFROZEN_PHASES), self._warm([Phase.STABLE])
            measured["kappa_error"] = kappa_error(before, after)
        if self._metrics is not None:
            measured["stage_ratios"] = dict(self._metrics.applied_stage_ratios)
            measured["average_freeze_ratio"] = self._metrics.average_freeze_ratio
            if self._metrics.score_bytes is not None and self._n_steps_collected:
                measured["score_ms_per_step"] = self._score_ms / self._n_steps_collected
                measured["score_memory_mib"] = self._metrics.score_bytes / _MIB
        measured |= _cached(self.cache)
        if controller is not None and controller.plans:
            measured["switched_off"] = controller.switched_off
            measured |= _planned(controller, start.batches_per_step)
        return replace(start, **measured)

    def _median_step_ms(self, phases: Sequence[Phase | None]) -> float | None:
        counted = self._warm(phases)
        return 1e3 * statistics.median(counted) if counted else None

    def _warm(self, phases: Sequence[Phase | None]) -> list[float]:
        return [s for phase in phases for s in self._step_seconds.get(phase, [])[SKIPPED_STEPS:]]

    def _speed(self, step_ms: float | None) -> float | None:
        """Return tokens/s per device at the run's mean number of tokens in a step.

        The mean, so that uneven padding does not show as speed.
        """
        if step_ms is None:
            return None
        return 1e3 * self._n_tokens / self._n_steps / step_ms

    def _median_batch_ms(self, phases: Sequence[Phase]) -> float | None:
        """Return the median over the first of ``phases`` that was measured."""
        measured = (self._batch_ms[phase] for phase in phases if self._batch_ms.get(phase))
        return next(map(statistics.median, measured), None)

    def _train_loss(self) -> float | None:
        if not self._losses:
            return None
        n_last = max(1, self._last_step // 10)
        recent = [loss for step, loss in self._losses if step > self._last_step - n_last]
        return statistics.fmean(recent or [self._losses[-1][1]])


def _cached(use: CacheUse | None) -> dict[str, Any]:
    if use is None:
        return {}
    return {
        "cache_batches": use.batches,
        "cache_entered": use.entered,
        "cache_saved_ms": use.saved_ms,
        "cache_spent_ms": use.spent_ms,
        "cache_mib": (use.memory_bytes + use.disk_bytes) / _MIB,
        "cache_read_ahead": use.read_ahead,
    }


def _planned(controller: FreezeController, batches_per_step: int) -> dict[str, Any]:
    plan, bounds = controller.plan, controller.bounds
    if plan is None:
        return {"failure": controller.failure or "not enough steps to measure"}
    return {
        "batch_ms_unfrozen_predicted": plan.unfrozen_batch_ms,
        "batch_ms_predicted": plan.batch_ms,
        "outside_ms": batches_per_step * plan.outside_ms,
        "step_ms_predicted": batches_per_step * (plan.batch_ms + plan.outside_ms),
        "all_frozen_batch_ms": plan.frozen_batch_ms,
        "interval_factor": None if bounds is None else bounds.interval_factor,
        "predicts_for": controller.predicts_for,
        "planned_gain": plan.gain,
        "steps_factor": plan.steps_factor,
        "upper_bound_gain": plan.upper_bound_gain,
        "planned_stage_ratios": plan.stage_mean_ratios(),
    }


def with_convergence(
    summary: RunSummary, p_eff: float | None, still: NeverUpdated | None
) -> RunSummary:
    """Return ``summary``, which has all times, with what freezing means for learning.

    Args:
        summary: The run so far.
        p_eff: Average effective update probability of the stable phase.
        still: How much of the model was never updated.
    """
    clock = by_virtual_clock(summary)
    before_ms, after_ms = clock.step_ms_unfrozen, clock.step_ms
    kappa = after_ms / before_ms if before_ms and after_ms else None
    return replace(
        summary,
        time_to_loss=_time_to_loss(summary, kappa),
        kappa=kappa,
        p_eff=p_eff,
        kappa_over_p_eff=kappa_over_p_eff(kappa, p_eff),
        never_updated_tensors=None if still is None else still.tensors,
        never_updated_elements=None if still is None else still.elements,
    )


def with_utilization(summary: RunSummary, flops_per_token: float, peak_flops: float) -> RunSummary:
    """Return ``summary``, which has all times, with model FLOPs utilization, as TorchTitan has it.

    Args:
        summary: The run so far.
        flops_per_token: That the model needs, forward and backward, nothing frozen.
        peak_flops: Of a device, each second; NaN where it is not known.
    """
    if math.isnan(peak_flops):
        return summary
    clock = by_virtual_clock(summary)

    def percent(tokens_per_second: float | None) -> float | None:
        if tokens_per_second is None:
            return None
        return 100 * flops_per_token * tokens_per_second / peak_flops

    return replace(
        summary,
        peak_tflops=peak_flops / 1e12,
        mfu_percent_unfrozen=percent(clock.tokens_per_second_unfrozen),
        mfu_percent=percent(clock.tokens_per_second),
    )


def with_cost(summary: RunSummary, device_seconds: float, price: float) -> RunSummary:
    """Return ``summary`` with what the run's devices were used for so long, and cost.

    Args:
        summary: The run so far.
        device_seconds: Of the whole run.
        price: Of a device in an hour; 0 where it is not known.
    """
    cost = price * device_seconds / 3600 if price else None
    return replace(summary, device_seconds=device_seconds, cost=cost)


def _time_to_loss(summary: RunSummary, kappa: float | None) -> float | None:
    """Return the estimated time to a loss; by the planned batches where no step was measured.

    None where freezing was switched off: such a run takes the time that it takes without.
    """
    if summary.switched_off is not None:
        return None
    before_ms, planned_ms = summary.batch_ms_unfrozen_predicted, summary.batch_ms_predicted
    if kappa is None and before_ms and planned_ms is not None:
        kappa = planned_ms / before_ms
    factor = summary.steps_factor
    return None if kappa is None or factor is None else kappa * factor


def summary_at_start(
    job_config: JobConfig, parallel_dims: ParallelDims, device_name: str, device_type: str
) -> RunSummary:
    """Return a summary of what is known before the first step.

    Args:
        job_config: The run's configuration.
        parallel_dims: How the run's processes share the work.
        device_name: What the device calls itself.
        device_type: Such as "cuda" or "cpu".
    """
    training, parallelism, data = job_config.training, job_config.parallelism, job_config.data
    replicas = parallel_dims.world_size // parallel_dims.non_data_parallel_size
    n_examples = training.local_batch_size * replicas
    csv = parallelism.pipeline_parallel_schedule_csv
    schedule = Path(csv).name if csv else parallelism.pipeline_parallel_schedule
    is_shuffled = has_rows(training.dataset) and data.shuffle
    path = ", ".join(data.paths) or training.dataset_path
    cores = f", {usable_cores():g} cores" if device_type == "cpu" else ""
    return RunSummary(
        method=job_config.freezing.method,
        schedule=schedule if parallel_dims.pp_enabled else None,
        seed=job_config.debug.seed,
        data_seed=data.seed if is_shuffled else None,
        config_file=job_config.job.config_file,
        model=f"{job_config.model.name} {job_config.model.flavor}",
        dataset=f"{training.dataset}: {path}" if path else training.dataset,
        n_devices=parallel_dims.world_size,
        ranks_per_replica=parallel_dims.non_data_parallel_size,
        # A global batch size below 1 stands for one batch on each replica.
        batches_per_step=max(1, training.global_batch_size // n_examples),
        device=f"{device_name}{cores}",
        torch_version=torch.__version__,
        steps=training.steps,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        unit=model_family(job_config).unit,
        counts_padding=job_config.report.count_padding,
    )
