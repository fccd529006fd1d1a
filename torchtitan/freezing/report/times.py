"""Times of a run, its memory, and derived values: kappa, time to a loss, utilization, cost."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils as titan_tools
from torchtitan.distributed import ParallelDims

from timelyfreeze.control import CollectedMetrics, FreezeController
from timelyfreeze.front.caching import CacheUse, use_of_parts
from timelyfreeze.planning import FreezePlan, steps_error
from timelyfreeze.policies import LORA
from timelyfreeze.records.convergence import TimedStep, kappa_over_p_eff
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds, usable_cores
from torchtitan.data.rows.kinds import has_rows
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, Run, RunPart
from torchtitan.settings import JobConfig, model_family

_MIB = 1024**2
_GIB = 1024**3
# A curve needs numbers.
PHASE_NUMBERS = {
    Phase.ADAPTERS: -1.0,
    Phase.WARMUP: 0.0,
    Phase.UPPER_BOUND: 1.0,
    Phase.MIXED: 1.5,  # both bounds at once
    Phase.LOWER_BOUND: 2.0,
    Phase.RAMP: 3.0,
    Phase.STABLE: 4.0,
    Phase.CONTROL: 4.5,  # among those
    Phase.OFF: 5.0,
}


class StepTimes(RunPart):
    """Collects the times of this process's steps; a resumed run records its own part only."""

    _last_step = 0

    def leave(self) -> None:
        self.run.steps.begin_pipeline()

    def end_step(self, ended: EndedStep) -> None:
        controller = self.run.controller
        turning_ms = 0.0 if controller is None else controller.turns.turning_ms()
        ms = 1e3 * ended.seconds
        self.run.steps.add(TimedStep(ended.phase, ms, ended.of_device, turning_ms))
        self._last_step = ended.step

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        freezes, steps = self.run.controller is not None, self.run.steps
        return {
            "steps_done": self._last_step,
            **steps.summed_up(freezes=freezes),
            "kappa_error": steps.kappa_error() if freezes else None,
            "control_steps": len(steps.paired_kappas()) or None,
            "seconds": self.run.seconds,
        }


class BatchTimes(RunPart):
    """Collects all ranks' measurements: times of batches, ratios, use of the cache."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._batch_ms: dict[Phase, list[float]] = {}
        self._drift: list[float] = []
        self._metrics: CollectedMetrics | None = None
        self._former_cache: CacheUse | None = None
        self._score_ms = 0.0
        self._n_steps = 0
        self._n_collected = 0

    @property
    def cache(self) -> CacheUse | None:
        """Use of the cache of a frozen front, in all pipelines of the run; None without."""
        latest = None if self._metrics is None else self._metrics.cache
        return use_of_parts(self._former_cache, latest)

    def begin_pipeline(self) -> None:
        """Forget batches of another pipeline but those of warm-up: without a plan none follow."""
        self._drift.clear()
        self._batch_ms = {p: ms for p, ms in self._batch_ms.items() if p is Phase.WARMUP}
        self._former_cache = self.cache
        if self._metrics is not None:
            self._metrics = replace(self._metrics, cache=None)

    def begin_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Forget batches of the stable phase, run under the former plan."""
        for phase in (Phase.STABLE, Phase.CONTROL):
            self._batch_ms.pop(phase, None)
        self._drift.clear()

    def end_step(self, ended: EndedStep) -> None:
        self._n_steps += 1

    def collect(self, metrics: CollectedMetrics) -> None:
        for phase, batch_ms in metrics.batch_ms.items():
            self._batch_ms.setdefault(phase, []).extend(batch_ms)
        if metrics.drift is not None:
            self._drift.append(metrics.drift)
        if metrics.score_ms_per_step is not None:
            self._score_ms += (self._n_steps - self._n_collected) * metrics.score_ms_per_step
        self._n_collected = self._n_steps
        self._metrics = metrics

    def log_step(self, logged: LoggedStep) -> dict[str, float | None]:
        controller, metrics = self.run.controller, logged.metrics
        if controller is None or metrics is None or logged.phase is None:
            return {}
        latest = metrics.batch_ms.get(logged.phase)
        found = {
            "freezing/phase": PHASE_NUMBERS[logged.phase],
            "freezing/average_ratio": metrics.average_freeze_ratio,
            "freezing/batch_ms/measured": sorted(latest)[len(latest) // 2] if latest else None,
            "freezing/batch_ms/predicted": controller.expected_batch_ms(),
            "freezing/drift": metrics.drift,
        }
        groups: dict[str, Mapping[Any, float]] = {
            "planned_ratio/stage_": controller.expected_stage_ratios(),
            "applied_ratio/stage_": metrics.applied_stage_ratios,
            "policy/": metrics.policy,
        }
        for group, values in groups.items():
            found |= {f"freezing/{group}{name}": value for name, value in values.items()}
        if metrics.score_ms_per_step is not None and metrics.score_bytes is not None:
            found["freezing/score_time_ms"] = metrics.score_ms_per_step
            found["freezing/score_memory_mib"] = metrics.score_bytes / _MIB
        if (use := self.cache) is not None:
            found |= {
                "freezing/cache/entered_batches": float(use.entered),
                "freezing/cache/read_ahead_rows": float(use.read_ahead),
                "freezing/cache/spent_ms": use.spent_ms,
                "freezing/cache/memory_mib": use.memory_bytes / _MIB,
                "freezing/cache/disk_mib": use.disk_bytes / _MIB,
                "freezing/cache/saved_ms": use.saved_ms,
            }
        return found

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        medians = {phase: statistics.median(ms) for phase, ms in self._batch_ms.items() if ms}
        # Those of control steps ran beside the frozen ones.
        unfrozen = (Phase.CONTROL, Phase.UPPER_BOUND, Phase.WARMUP)
        found: dict[str, Any] = {
            "batch_ms_unfrozen": next((medians[p] for p in unfrozen if p in medians), None),
            "control_batches": len(self._batch_ms.get(Phase.CONTROL, ())) or None,
            "batch_ms": medians.get(Phase.STABLE),
            "drift": statistics.median(self._drift) if self._drift else None,
        }
        if (metrics := self._metrics) is not None:
            found["stage_ratios"] = dict(metrics.applied_stage_ratios)
            found["average_freeze_ratio"] = metrics.average_freeze_ratio
            if metrics.score_bytes is not None and self._n_collected:
                found["score_ms_per_step"] = self._score_ms / self._n_collected
                found["score_memory_mib"] = metrics.score_bytes / _MIB
        if (use := self.cache) is not None:
            names = ("batches", "entered", "saved_ms", "spent_ms", "read_ahead")
            found |= {f"cache_{name}": getattr(use, name) for name in names}
            found["cache_mib"] = (use.memory_bytes + use.disk_bytes) / _MIB
        controller = self.run.controller
        if controller is not None and controller.phases.measures:
            found["switched_off"] = controller.active_plan.switched_off
            found |= _planned(controller, summary.batches_per_step)
        return found


def _planned(controller: FreezeController, batches_per_step: int) -> dict[str, Any]:
    plan, bounds = controller.plan, controller.active_plan.bounds
    if plan is None:
        return {"failure": controller.planner.failure or "not enough steps to measure"}
    return {
        "gradient_rank": controller.subspaces.dimension,
        "batch_ms_unfrozen_predicted": plan.unfrozen_batch_ms,
        "batch_ms_predicted": plan.batch_ms,
        "outside_ms": batches_per_step * plan.outside_ms,
        "step_ms_predicted": batches_per_step * (plan.batch_ms + plan.outside_ms),
        "all_frozen_batch_ms": plan.frozen_batch_ms,
        "interval_factor": None if bounds is None else bounds.interval_factor,
        "predicts_for": controller.active_plan.predicts_for,
        "planned_gain": plan.gain,
        "steps_factor": plan.steps_factor,
        "steps_factor_error": bounds and steps_error(controller.active_plan.dag, plan, bounds),
        "upper_bound_gain": plan.upper_bound_gain,
        "planned_stage_ratios": plan.stage_mean_ratios(),
    }


class Memory(RunPart):
    """Remembers the peak of a device, reset by upstream after logging."""

    _peak_bytes = -1  # unknown

    def gather(self, *_: Any, **__: Any) -> None:
        stats = titan_tools.device_module.memory_stats(self.run.device)
        self._peak_bytes = max(self._peak_bytes, stats.get("reserved_bytes.all.peak", -1))

    log_step = log_validation = gather  # both are just before upstream's reset

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        """Return the largest peak of all ranks; None where the device tells none."""
        peak = max(self.run.exchange.all_gather(self._peak_bytes))
        return {"peak_memory_gib": None if peak < 0 else peak / _GIB}


class Outcome(RunPart):
    """Sums up the times of a run."""

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        run = self.run
        found = convergence(summary) | utilization(summary, run.flops_per_token, run.peak_flops)
        price, seconds = run.config.report.device_hour_price, summary.device_seconds
        if price and seconds is not None:
            found["cost"] = price * seconds / 3600
        return found


def convergence(summary: RunSummary) -> dict[str, Any]:
    """Return freezing's effect on learning, from all times and p_eff of the stable phase."""
    clock = summary.by_virtual_clock()
    before_ms, after_ms = clock.step_ms_unfrozen, clock.step_ms
    kappa = after_ms / before_ms if before_ms and after_ms else None
    found = {"kappa": kappa, "kappa_over_p_eff": kappa_over_p_eff(kappa, summary.p_eff)}
    factor = summary.steps_factor if summary.switched_off is None else None
    # By planned batches where no step was measured.
    before_ms, planned_ms = summary.batch_ms_unfrozen_predicted, summary.batch_ms_predicted
    if kappa is None and before_ms and planned_ms is not None:
        kappa = planned_ms / before_ms
    return found | {"time_to_loss": None if kappa is None or factor is None else kappa * factor}


def utilization(summary: RunSummary, flops_per_token: float, peak_flops: float) -> dict[str, Any]:
    """Return model FLOPs utilization, as TorchTitan's; nothing without a known peak."""
    if math.isnan(peak_flops):
        return {}
    clock = summary.by_virtual_clock()
    before, after = clock.tokens_per_second_unfrozen, clock.tokens_per_second
    return {
        "peak_tflops": peak_flops / 1e12,
        "mfu_percent_unfrozen": before and 100 * flops_per_token * before / peak_flops,
        "mfu_percent": after and 100 * flops_per_token * after / peak_flops,
    }


def summary_at_start(
    job_config: JobConfig, parallel_dims: ParallelDims, device_name: str, device_type: str
) -> RunSummary:
    """Return a summary of the facts before the first step; ``device_type`` as "cuda"."""
    training, parallelism, data = job_config.training, job_config.parallelism, job_config.data
    replicas = parallel_dims.world_size // parallel_dims.non_data_parallel_size
    n_examples = training.local_batch_size * replicas
    csv = parallelism.pipeline_parallel_schedule_csv
    schedule = Path(csv).name if csv else parallelism.pipeline_parallel_schedule
    is_shuffled = has_rows(training.dataset) and data.shuffle
    path = ", ".join(data.paths) or training.dataset_path
    method, until = job_config.freezing.method, job_config.lora.until
    cores = f", {usable_cores():g} cores" if device_type == "cpu" else ""
    return RunSummary(
        method=f"{LORA}+{method}" if until else method,
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
        adapters_until=until or None,
        steps=training.steps,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        unit=model_family(job_config).unit,
        counts_padding=job_config.report.count_padding,
        packing=data.packing,
    )
