"""What TensorBoard shows of a run: metrics by tag, in groups, and what runs are told apart by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch.utils.tensorboard.summary import hparams
from torchtitan.components.metrics import TensorBoardLogger

from timelyfreeze.files import markdown_table
from timelyfreeze.front.caching import CacheUse
from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.records import RunSummary
from timelyfreeze.settings import Phase
from torchtitan.freezing.config import JobConfig, model_family
from torchtitan.freezing.report.parts import LoggedStep, Run, RunPart
from torchtitan.freezing.report.run_folder import OutputGuard
from torchtitan.freezing.report.times import BatchTimes

_MIB = 1024**2
# A curve needs numbers.
PHASE_NUMBERS = {
    Phase.WARMUP: 0.0,
    Phase.UPPER_BOUND: 1.0,
    Phase.MIXED: 1.5,  # both bounds at once
    Phase.LOWER_BOUND: 2.0,
    Phase.RAMP: 3.0,
    Phase.STABLE: 4.0,
    Phase.OFF: 5.0,
}


class FreezingTags(RunPart):
    """Says what is logged of freezing in a step; what is not known has no tag."""

    def __init__(self, run: Run, batches: BatchTimes) -> None:
        super().__init__(run)
        self._batches = batches

    def log_step(self, logged: LoggedStep) -> dict[str, float]:
        """Return the metrics of a logged step."""
        controller, metrics = self.run.controller, logged.metrics
        if controller is None or metrics is None or logged.phase is None:
            return {}
        found = {
            "freezing/phase": PHASE_NUMBERS[logged.phase],
            "freezing/average_ratio": metrics.average_freeze_ratio,
        }
        for group, values in {
            "planned_ratio/stage_": controller.expected_stage_ratios(),
            "applied_ratio/stage_": metrics.applied_stage_ratios,
            "policy/": metrics.policy,
        }.items():
            found |= {f"freezing/{group}{name}": value for name, value in values.items()}
        if metrics.score_ms_per_step is not None and metrics.score_bytes is not None:
            found["freezing/score_time_ms"] = metrics.score_ms_per_step
            found["freezing/score_memory_mib"] = metrics.score_bytes / _MIB
        latest = metrics.batch_ms.get(logged.phase)
        known = {
            **_of_cache(self._batches.cache),
            "freezing/batch_ms/measured": sorted(latest)[len(latest) // 2] if latest else None,
            "freezing/batch_ms/predicted": controller.expected_batch_ms(),
            "freezing/drift": metrics.drift,
        }
        return found | {tag: value for tag, value in known.items() if value is not None}


def _of_cache(cache: CacheUse | None) -> dict[str, float | None]:
    if cache is None:
        return {}
    return {
        "freezing/cache/entered_batches": float(cache.entered),
        "freezing/cache/read_ahead_rows": float(cache.read_ahead),
        "freezing/cache/spent_ms": cache.spent_ms,
        "freezing/cache/memory_mib": cache.memory_bytes / _MIB,
        "freezing/cache/disk_mib": cache.disk_bytes / _MIB,
        "freezing/cache/saved_ms": cache.saved_ms,
    }


# The custom scalars tab draws no line of a tag that has a parenthesis. Upstream's throughput has
# one and is written a second time, under the tag behind it.
THROUGHPUT = ("throughput(tps)", "freezing/tokens_per_second")

# The custom scalars tab: lines of each chart, by group. Tags are regular expressions there.
_CHARTS = {
    "speed": {
        "{unit}/s per device": [r"^freezing/(emulation/virtual_)?{unit}_per_second$"],
        "batch, ms, measured and predicted": [r"^freezing/batch_ms/.*"],
        "machine, times as slow as when measured": [r"^freezing/drift$"],
        "step of an emulated pipeline, ms": [r"^freezing/emulation/virtual_step_ms$"],
    },
    "freezing": {
        "frozen in the step, by stage": [r"^freezing/applied_ratio/.*"],
        "planned for the step, by stage": [r"^freezing/planned_ratio/.*"],
        "mean so far": [r"^freezing/average_ratio$"],
        "phase": [r"^freezing/phase$"],
    },
    "convergence": {
        "kappa and p_eff": [r"^freezing/(kappa|p_eff)$"],
        "kappa / p_eff": [r"^freezing/kappa_over_p_eff$"],
    },
    "loss": {
        "training and validation": [
            r"^loss_metrics/global_avg_loss$",
            r"^validation_metrics/loss$",
        ],
        "gradient norm": [r"^grad_norm$"],
    },
}


def layout(unit: str) -> dict[str, dict[str, list[Any]]]:
    """Return the custom scalars tab of a run whose throughput counts ``unit``."""
    return {
        group: {
            title.format(unit=unit): ["Multiline", [tag.replace("{unit}", unit) for tag in tags]]
            for title, tags in charts.items()
        }
        for group, charts in _CHARTS.items()
    }


def tag_of(tag: str, unit: str) -> str:
    """Return the name of ``tag`` in a run whose throughput counts ``unit``."""
    if unit == "tokens":
        return tag
    for tokens in ("tps", "tokens_per_second"):
        tag = tag.replace(tokens, f"{unit}_per_second")
    return tag


# Metrics of a summary that the table of runs has, by tag.
_FINAL = (
    "tokens_per_second", "batch_ms", "train_loss", "validation_loss", "average_freeze_ratio",
    "time_to_loss", "kappa", "p_eff", "kappa_over_p_eff", "seconds", "peak_memory_gib",
)  # fmt: skip
FINAL = {"freezing/final/" + name.replace("freeze_ratio", "ratio"): name for name in _FINAL}


class RunTensorBoard(TensorBoardLogger, RunPart):
    """TensorBoard files of one run.

    Metrics that do not exist (MFU on a CPU) are left out, not drawn as NaN. The guard lets the run
    go on where files cannot be written.
    """

    def __init__(self, folder: str, job_config: JobConfig, guard: OutputGuard) -> None:
        super().__init__(folder)
        self._guard = guard
        self.writer.add_text("settings", _as_table(job_config.to_dict()), 0)
        self._unit = model_family(job_config).unit
        self.writer.add_custom_scalars(layout(self._unit))
        final = dict.fromkeys((tag_of(tag, self._unit) for tag in FINAL), 0)
        experiment, begin, self._end = hparams(hyperparameters(job_config), final)
        # To the run's own files: torch's add_hparams would make another run below this one.
        for part in (experiment, begin):
            self.writer.file_writer.add_summary(part)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write the finite metrics."""
        known = {k: v for k, v in metrics.items() if not (isinstance(v, float) and math.isnan(v))}
        upstreams, ours = THROUGHPUT
        if upstreams in known:
            known[ours] = known[upstreams]
        with self._guard.writing():
            super().log({tag_of(tag, self._unit): value for tag, value in known.items()}, step)

    def finish(self, summary: RunSummary) -> None:
        """Write what the run ended with, beside its hyperparameters."""
        with self._guard.writing():
            for tag, name in FINAL.items():
                value = getattr(summary, name)
                if value is not None:
                    self.writer.add_scalar(tag_of(tag, self._unit), value, summary.steps_done)
            self.writer.file_writer.add_summary(self._end)

    def close(self) -> None:
        """Write what is still held back."""
        with self._guard.writing():
            super().close()


_ALWAYS = (
    "freezing.method", "training.dataset", "training.steps", "training.local_batch_size",
    "training.seq_len", "optimizer.lr", "debug.seed", "emulation.enable",
)  # fmt: skip
_OF_PIPELINES = ("pipeline_parallel_degree", "pipeline_parallel_microbatch_size")
_OF_PLANS = ("max_freeze_ratio", "monitoring", "skip_input_grads", "first_stage")


def hyperparameters(job_config: JobConfig) -> dict[str, bool | float | str]:
    """Return what runs are filtered by; keys that are unset, or have no say, are left out."""
    parallelism, method = job_config.parallelism, job_config.freezing.method
    is_pipeline = parallelism.pipeline_parallel_degree > 1
    keys = [
        *_ALWAYS,
        *(f"parallelism.{key}" for key in _OF_PIPELINES if is_pipeline),
        *(["freezing.last_warmup_step"] if freezes_by_turns(method) else []),
        *(f"freezing.{key}" for key in _OF_PLANS if method.startswith("timelyfreeze")),
    ]
    values = {key: attrgetter(key)(job_config) for key in keys}
    values["model"] = f"{job_config.model.name} {job_config.model.flavor}"
    if is_pipeline:
        csv = parallelism.pipeline_parallel_schedule_csv
        values["schedule"] = csv or parallelism.pipeline_parallel_schedule
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _as_table(settings: Mapping[str, Any]) -> str:
    """Return the settings as a markdown table, which TensorBoard's text tab renders."""
    rows = (
        (f"{section}.{key}", str(value))
        for section, values in settings.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    )
    return markdown_table(["key", "value"], rows)
