"""TensorBoard's view of a run: metrics by tag, in groups, and settings of runs."""

import math
from operator import attrgetter
from typing import Any

from torch.utils.tensorboard.summary import hparams
from torchtitan.components.metrics import TensorBoardLogger

from timelyfreeze.files import markdown_table
from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.records.summary import FINAL, RunSummary
from torchtitan.freezing.report.parts import Run, RunPart
from torchtitan.settings import JobConfig, model_family

# The custom scalars tab draws no line of a tag that has a parenthesis. Upstream's throughput has
# one and is written a second time, under the tag behind it.
THROUGHPUT = ("throughput(tps)", "freezing/tokens_per_second")

# The custom scalars tab: lines of each chart, by group. Tags are regular expressions there.
_CHARTS = {
    "speed": {
        "{unit}/s per device": r"^freezing/(emulation/virtual_)?{unit}_per_second$",
        "batch, ms, measured and predicted": r"^freezing/batch_ms/.*",
        "machine, times as slow as when measured": r"^freezing/drift$",
        "step of an emulated pipeline, ms": r"^freezing/emulation/virtual_step_ms$",
    },
    "freezing": {
        "frozen in the step, by stage": r"^freezing/applied_ratio/.*",
        "planned for the step, by stage": r"^freezing/planned_ratio/.*",
        "mean so far": r"^freezing/average_ratio$",
        "phase": r"^freezing/phase$",
    },
    "convergence": {
        "kappa and p_eff": r"^freezing/(kappa|p_eff)$",
        "kappa / p_eff": r"^freezing/kappa_over_p_eff$",
    },
    "loss": {
        "training and validation": r"^(loss_metrics/global_avg_loss|validation_metrics/loss)$",
        "gradient norm": r"^grad_norm$",
    },
}


def layout(unit: str) -> dict[str, dict[str, list[Any]]]:
    """Return the custom scalars tab of a run whose throughput counts ``unit``."""
    return {
        group: {
            title.format(unit=unit): ["Multiline", [tags.replace("{unit}", unit)]]
            for title, tags in charts.items()
        }
        for group, charts in _CHARTS.items()
    }


def tag_of(tag: str, unit: str) -> str:
    """Return the name of ``tag`` in a run whose throughput counts ``unit``."""
    own = f"{unit}_per_second"
    return tag if unit == "tokens" else tag.replace("tps", own).replace("tokens_per_second", own)


class RunTensorBoard(TensorBoardLogger, RunPart):
    """TensorBoard files of a run; missing metrics are left out, not drawn as NaN."""

    def __init__(self, folder: str, run: Run) -> None:
        super().__init__(folder)
        self.run, job_config = run, run.config
        rows = (
            (f"{section}.{key}", str(value))
            for section, values in job_config.to_dict().items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        )
        self.writer.add_text("settings", markdown_table(["key", "value"], rows), 0)
        self._unit = model_family(job_config).unit
        self.writer.add_custom_scalars(layout(self._unit))
        names = {name: name.replace("freeze_ratio", "ratio") for name in FINAL}
        self._final = {k: tag_of(f"freezing/final/{n}", self._unit) for k, n in names.items()}
        final = dict.fromkeys(self._final.values(), 0)
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
        with self.run.writing():
            super().log({tag_of(tag, self._unit): value for tag, value in known.items()}, step)

    def finish(self, summary: RunSummary) -> None:
        with self.run.writing():
            for name, tag in self._final.items():
                if (value := getattr(summary, name)) is not None:
                    self.writer.add_scalar(tag, value, summary.steps_done)
            self.writer.file_writer.add_summary(self._end)

    def close(self) -> None:
        with self.run.writing():
            super().close()


_ALWAYS = (
    "freezing.method", "training.dataset", "training.steps", "training.local_batch_size",
    "training.seq_len", "optimizer.lr", "debug.seed", "emulation.enable",
)  # fmt: skip
_OF_PIPELINES = ("pipeline_parallel_degree", "pipeline_parallel_microbatch_size")
_OF_PLANS = ("max_freeze_ratio", "gradient_rank", "monitoring", "skip_input_grads", "first_stage")


def hyperparameters(job_config: JobConfig) -> dict[str, bool | float | str]:
    """Return the settings to filter runs by; unset keys and keys without effect are left out."""
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
