"""Optimizer steps of a run as they end: rows of ``steps.csv``, kappa and p_eff.

Times of a step are known when it ends, what it froze on all ranks when metrics are next exchanged.
So rows are written at logged steps, all since the one before. A run that is killed loses those
since then; one that fails loses none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from timelyfreeze.control import CollectedMetrics
from timelyfreeze.records import STEPS, StepRatio, StepRow, kappa_over_p_eff, mean_p_eff
from timelyfreeze.settings import FREEZING_PHASES, Phase


class StepRecord:
    """Collects what is known of each step and writes it down.

    Args:
        folder: Of the run, where rows go; None on ranks that write nothing.
        emulates: Whether kappa is that of the virtual clock.
        writing: What rows are written in.

    Attributes:
        latest_kappa: Last one since freezing began; None before.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        emulates: bool,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder = folder
        if folder is not None:
            STEPS.write(folder)
        self._writing = writing
        self._emulates = emulates
        self._ended: list[StepRow] = []
        self._n_virtual = 0  # of the ended rows, how many have their virtual time
        self._ratios: dict[int, float] = {}
        self._logged: dict[int, dict[str, Any]] = {}
        self._kappa = StepRatio()
        self._stable: list[tuple[float, float]] = []
        self.latest_kappa: float | None = None

    def begin_pipeline(self) -> None:
        """Compare steps to come, of another pipeline, with the unfrozen ones so far."""
        self._kappa.begin_pipeline()

    def add_virtual(self, steps: Sequence[tuple[Phase | None, float]]) -> None:
        """Take note of the virtual times in milliseconds of the next steps that have ended."""
        for phase, virtual_ms in steps:
            self._kappa.add(phase, virtual_ms)
            row = self._ended[self._n_virtual]
            self._ended[self._n_virtual] = replace(row, virtual_step_ms=virtual_ms)
            self._n_virtual += 1

    def log(
        self,
        step: int,
        loss: float,
        phase: Phase | None = None,
        metrics: CollectedMetrics | None = None,
        predicted_ms: float | None = None,
        n_replicas: int = 1,
    ) -> dict[str, float]:
        """Take note of what is logged of a step that is about to end.

        Args:
            step: Its number.
            loss: Training loss.
            phase: Its phase; None for a run without freezing.
            metrics: What all ranks have exchanged; None likewise.
            predicted_ms: Prediction for its batches.
            n_replicas: How often the gradient energy of the model is in that of all ranks.

        Returns:
            kappa, p_eff and their ratio, as far as they are known, by their tags.
        """
        values: dict[str, Any] = {"train_loss": loss, "batch_predicted_ms": predicted_ms}
        self._logged[step] = values
        if metrics is None or phase is None:
            return {}
        self._ratios.update(metrics.step_ratios)
        batches_ms = metrics.batch_ms.get(phase)
        values["batch_ms"] = statistics.median(batches_ms) if batches_ms else None
        values["kappa"] = kappa = self._kappa.take(phase)
        # While everything is frozen to measure, it is no gain.
        if phase in FREEZING_PHASES:
            self.latest_kappa = kappa or self.latest_kappa
        values["p_eff"] = p_eff = None if metrics.energy is None else metrics.energy.p_eff
        if phase is Phase.STABLE and metrics.energy is not None and p_eff is not None:
            self._stable.append((p_eff, metrics.energy.total / n_replicas))
        tags = {
            "freezing/kappa": kappa,
            "freezing/p_eff": p_eff,
            "freezing/kappa_over_p_eff": kappa_over_p_eff(kappa, p_eff),
        }
        return {tag: value for tag, value in tags.items() if value is not None}

    def end_step(
        self, step: int, phase: Phase | None, seconds: float, total_seconds: float, n_tokens: float
    ) -> None:
        """Take note of a finished step.

        Args:
            step: Its number.
            phase: Its phase; None for a run without freezing.
            seconds: How long it took.
            total_seconds: What all steps so far took.
            n_tokens: Its tokens for each device.
        """
        if not self._emulates:
            self._kappa.add(phase, 1e3 * seconds)
        self._ended.append(
            StepRow(
                step=step,
                phase="" if phase is None else phase.value,
                seconds=total_seconds,
                step_ms=1e3 * seconds,
                tokens_per_second=n_tokens / seconds if seconds > 0.0 else math.nan,
                freeze_ratio=0.0 if phase is None else None,
            )
        )
        if step in self._logged:
            # The virtual time of this step is not known before metrics are exchanged again.
            self._write(self._n_virtual if self._emulates else len(self._ended))

    @property
    def p_eff(self) -> float | None:
        """Average of p_eff over what was logged of the stable phase, Eq. 28; None if nothing."""
        return mean_p_eff(self._stable)

    def add_ratios(self, metrics: CollectedMetrics) -> None:
        """Take note of what steps have frozen that were never logged."""
        self._ratios.update(metrics.step_ratios)

    def close(self) -> None:
        """Write what is still out."""
        self._write(len(self._ended))

    def _write(self, n: int) -> None:
        rows, self._ended = self._ended[:n], self._ended[n:]
        self._n_virtual = max(0, self._n_virtual - n)
        complete = []
        for row in rows:
            known = self._logged.pop(row.step, {})
            if row.step in self._ratios:
                known["freeze_ratio"] = self._ratios.pop(row.step)
            complete.append(replace(row, **known))
        if self._folder is not None and complete:
            with self._writing():
                STEPS.append(self._folder, complete)
