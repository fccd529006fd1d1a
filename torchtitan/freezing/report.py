"""The short report at the end of a run: what freezing brought, and whether the prediction held."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.controller import FreezeController
from timelyfreeze.passes import CollectedFigures
from timelyfreeze.phases import Phase

# Steps of a phase that are not counted: the first ones run cold.
SKIPPED_STEPS = 2


class RunReport:
    """Collects step and batch times of this process's run and renders them.

    A resumed run reports on its own part only.
    """

    def __init__(self) -> None:
        self._step_seconds: dict[Phase | None, list[float]] = {}
        self._n_tokens = 0
        self._n_steps = 0
        self._batch_ms: dict[Phase, list[float]] = {}
        self._figures: CollectedFigures | None = None

    def add_step(self, phase: Phase | None, seconds: float, n_tokens: int) -> None:
        """Take note of one optimizer step."""
        self._step_seconds.setdefault(phase, []).append(seconds)
        self._n_tokens += n_tokens
        self._n_steps += 1

    def add_batches(self, figures: CollectedFigures) -> None:
        """Take note of measured batches."""
        for phase, batch_ms in figures.batch_ms.items():
            self._batch_ms.setdefault(phase, []).extend(batch_ms)
        self._figures = figures

    def render(
        self, controller: FreezeController | None, ranks_per_replica: int, run_folder: Path
    ) -> str:
        """Return the report.

        Args:
            controller: The run's controller, or None if nothing was frozen by design.
            ranks_per_replica: Devices that share one batch; tokens/s are per device, as TorchTitan
                counts them.
            run_folder: Where the run's files are.
        """
        lines = ["", "Run report", "----------"]
        if controller is None:
            lines += self._plain(ranks_per_replica)
        else:
            lines += self._frozen(controller, ranks_per_replica)
        lines.append(f"files                    {run_folder}")
        lines.append(f"TensorBoard              tensorboard --logdir {run_folder.parent}")
        return "\n".join(lines) + "\n"

    def _plain(self, ranks: int) -> list[str]:
        seconds = self._median_seconds([None])
        if seconds is None:
            return ["too few steps to measure"]
        return [f"tokens/s per device      {self._tokens_per_second(seconds, ranks):,.0f}"]

    def _frozen(self, controller: FreezeController, ranks: int) -> list[str]:
        before = self._median_seconds([Phase.WARMUP, Phase.UPPER_BOUND])
        after = self._median_seconds([Phase.STABLE])
        lines = []
        if before is not None:
            lines.append(
                f"without freezing         {self._tokens_per_second(before, ranks):,.0f} "
                f"tokens/s per device, {1e3 * before:.1f} ms a step"
            )
        if after is not None:
            lines.append(
                f"with freezing            {self._tokens_per_second(after, ranks):,.0f} "
                f"tokens/s per device, {1e3 * after:.1f} ms a step"
            )
        if before is not None and after is not None:
            lines.append(f"gain                     {100 * (before / after - 1):+.1f}% throughput")
        plan = controller.plan
        if plan is None:
            return [
                *lines,
                f"no freeze plan           {controller.failure or 'not enough steps to measure'}",
            ]
        lines.append(
            _batch_line(
                "batch without freezing",
                plan.unfrozen_batch_ms,
                self._batch_ms.get(Phase.UPPER_BOUND),
            )
        )
        lines.append(
            _batch_line("batch with freezing", plan.batch_ms, self._batch_ms.get(Phase.STABLE))
        )
        lines.append(
            f"limit                    {plan.frozen_batch_ms:.1f} ms a batch with everything "
            f"frozen ({100 * plan.limit_gain:+.1f}%); the plan reaches {100 * plan.gain:+.1f}%"
        )
        ratios = " ".join(f"{s}: {r:.2f}" for s, r in plan.stage_mean_ratios().items())
        lines.append(f"planned freeze ratio     stage {ratios}")
        if self._figures is not None:
            applied = " ".join(
                f"{s}: {r:.2f}" for s, r in self._figures.applied_stage_ratios.items()
            )
            lines.append(f"applied in the last step stage {applied}")
            lines.append(
                f"average freeze ratio     {self._figures.average_freeze_ratio:.3f} over all steps"
            )
        return lines

    def _median_seconds(self, phases: Sequence[Phase | None]) -> float | None:
        counted = [s for phase in phases for s in self._step_seconds.get(phase, [])[SKIPPED_STEPS:]]
        return statistics.median(counted) if counted else None

    def _tokens_per_second(self, seconds: float, ranks: int) -> float:
        """Return tokens/s at the run's mean number of tokens in a step.

        The mean, so that uneven padding does not show as speed.
        """
        return self._n_tokens / self._n_steps / seconds / ranks


def _batch_line(name: str, predicted_ms: float, measured_ms: Sequence[float] | None) -> str:
    line = f"{name:<24} predicted {predicted_ms:.1f} ms"
    if not measured_ms:
        return line + ", not measured"
    median_ms = statistics.median(measured_ms)
    return f"{line}, measured {median_ms:.1f} ms ({100 * (median_ms / predicted_ms - 1):+.1f}%)"
