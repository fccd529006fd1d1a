"""Optimizer steps of a run as they end: rows of ``steps.csv``, kappa and p_eff.

Times of a step are known when it ends, what it froze on all ranks when metrics are next exchanged.
So rows are written at logged steps, all since the one before. A run that is killed loses those
since then; one that fails loses none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from timelyfreeze.control import CollectedMetrics, ObservedBatch
from timelyfreeze.files import Table, parse_json
from timelyfreeze.policies import Decision
from timelyfreeze.records import (
    ACCURACIES,
    FRONT,
    LOSSES,
    MOVES,
    PLASTICITY,
    SKIPPED_STEPS,
    STEPS,
    WINDOW,
    AccuracyRow,
    FrontRow,
    Move,
    PlasticityRow,
    StepRatio,
    StepRow,
    kappa_over_p_eff,
    last_running_mean,
    mean_p_eff,
    seconds_to_reach,
)
from timelyfreeze.settings import FREEZING_PHASES, Phase
from torchtitan.freezing.config import JobConfig


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


Row = TypeVar("Row")

# Phases in which a policy's choice is frozen, under a plan or alone.
_IN_FORCE = (Phase.RAMP, Phase.STABLE)


class FrontRecord:
    """Collects what is known of the front and writes it where metrics are logged.

    A file is begun with its first rows: a run whose method freezes no front has none.

    Args:
        folder: Of the run.
        caches: Whether the run keeps what the front puts out.
        writing: What rows are written in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        caches: bool,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder = folder
        self._caches = caches
        self._writing = writing
        self._rows: list[FrontRow] = []
        self._evaluations: list[PlasticityRow] = []
        self._last: Decision | None = None

    def add_batch(self, observed: ObservedBatch) -> None:
        """Take note of a batch, the oldest first."""
        policy = observed.policy
        if "frozen_layers" not in policy:
            return
        read = int(observed.entry_stage is not None) if self._caches else None
        if self._rows and self._rows[-1].step == observed.step:
            row = self._rows[-1]
            read = None if read is None or row.read is None else row.read + read
            self._rows[-1] = replace(row, batches=row.batches + 1, read=read)
            return
        is_in_force = observed.phase in _IN_FORCE
        counts = {
            name: int(policy[name])
            for name in ("frozen_modules", "bootstrapping")
            if name in policy
        }
        frozen_layers = int(policy["frozen_layers"]) if is_in_force else 0
        self._rows.append(
            FrontRow(observed.step, observed.phase.value, frozen_layers, 1, read, **counts)
        )

    def end_step(self, decision: Decision | None) -> None:
        """Take note of what the policy, if there is one, has decided last."""
        if decision is None or decision is self._last:
            return
        self._last = decision
        self._evaluations += [
            PlasticityRow(found.step, found.module, found.value, found.smoothed)
            for found in decision.evaluations
        ]

    def write(self) -> None:
        """Write what has been collected; times of all batches so far have been read."""
        rows, self._rows = self._rows, []
        evaluations, self._evaluations = self._evaluations, []
        with self._writing():
            if rows:
                _add(FRONT, self._folder, rows)
            if evaluations:
                _add(PLASTICITY, self._folder, evaluations)


def _add(table: Table[Row], folder: Path, rows: list[Row]) -> None:
    if (folder / table.name).exists():
        table.append(folder, rows)
    else:
        table.write(folder, rows)


@dataclass(frozen=True)
class TimedMove:
    """A move and what it brought.

    Attributes:
        move: To which pipeline, and when.
        before_ms: Median step of the pipeline that was left, without its first ones, which run
            cold; None if it had no other.
        after_ms: Likewise of the pipeline that came.
    """

    move: Move
    before_ms: float | None
    after_ms: float | None


class MoveRecord:
    """Collects moves and writes each down at once.

    Args:
        folder: Of the run; None on ranks that write nothing.
        writing: What rows are written in.
    """

    def __init__(
        self,
        folder: Path | None,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder = folder
        self._writing = writing
        self._moves: list[Move] = []
        self._seconds: list[list[float]] = [[]]  # of the steps in each pipeline

    def add_step(self, seconds: float) -> None:
        """Take note of a finished step in the present pipeline."""
        self._seconds[-1].append(seconds)

    def add(self, move: Move) -> None:
        """Take note of a move; steps to come are those of the new pipeline."""
        self._moves.append(move)
        self._seconds.append([])
        if self._folder is not None:
            with self._writing():
                if len(self._moves) == 1:
                    MOVES.write(self._folder)
                MOVES.append(self._folder, [move])

    @property
    def seconds(self) -> float:
        """What all moves took together."""
        return sum(move.seconds for move in self._moves)

    def timed(self) -> list[TimedMove]:
        """Return the moves so far, the oldest first."""
        medians = [_median_ms(seconds) for seconds in self._seconds]
        triples = zip(self._moves, medians[:-1], medians[1:], strict=True)
        return [TimedMove(move, before, after) for move, before, after in triples]


def _median_ms(seconds: list[float]) -> float | None:
    warm = seconds[SKIPPED_STEPS:]
    return 1e3 * statistics.median(warm) if warm else None


class LossCurve:
    """Appends rows to a CSV file.

    Args:
        path: A file that does not exist yet, in a folder that does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._append("step,seconds,train_loss,validation_loss")

    def add_train(self, step: int, seconds: float, loss: float) -> None:
        """Append a logged training loss."""
        self._append(f"{step},{seconds:.3f},{loss!r},")

    def add_validation(self, step: int, seconds: float, loss: float) -> None:
        """Append the loss of a validation."""
        self._append(f"{step},{seconds:.3f},,{loss!r}")

    def _append(self, row: str) -> None:
        # Opened for each row: what is closed is not lost in a crash.
        with self._path.open("a") as file:
            file.write(row + "\n")


def add_accuracies(folder: Path, row: AccuracyRow) -> None:
    """Append what a validation counted to ``accuracies.csv``, which a run on text never has."""
    if not (folder / ACCURACIES.name).exists():
        ACCURACIES.write(folder)
    ACCURACIES.append(folder, [row])


class FiniteWatch:
    """Looks at each logged step; upstream logs what is not finite and trains on."""

    def __init__(self) -> None:
        self._was_finite = True

    def note(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        phase: Phase | None = None,
        stage_ratios: Mapping[int, float] | None = None,
    ) -> str | None:
        """Return a warning at the first step of each spell that is not finite.

        Args:
            step: The logged step.
            loss: Its training loss.
            grad_norm: Its gradient norm.
            phase: What the step was for; None where nothing is frozen by design.
            stage_ratios: What was frozen of each stage in it.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite or not was_finite:
            return None
        text = f"Step {step} has loss {loss:g} and gradient norm {grad_norm:g}"
        mend = "resume from a checkpoint before it, with a lower optimizer.lr or another debug.seed"
        if phase is not None:
            ratios = " ".join(f"{s}:{r:.2f}" for s, r in (stage_ratios or {}).items()) or "unknown"
            text += f", in freezing phase {phase.value}, frozen of each stage: {ratios}"
            mend += ", or a lower freezing.max_freeze_ratio"
        return f"{text}; weights that are not finite stay so: {mend}"


_KEY = "report.reference_run"


@dataclass(frozen=True)
class Reference:
    """What a run has to reach.

    Attributes:
        folder: Of the reference run.
        loss: Its last training loss, mean of ``WINDOW`` logged ones.
        seconds: When its own mean first came down to that.
        device: What it ran on; None if it does not say.
    """

    folder: Path
    loss: float
    seconds: float
    device: str | None

    def compared(self, folder: Path) -> dict[str, Any]:
        """Return the fields of a summary that hold the run in ``folder`` against this one."""
        return {
            "reference_run": str(self.folder),
            "reference_device": self.device,
            "reference_loss": self.loss,
            "reference_seconds": self.seconds,
            "seconds_to_reference_loss": seconds_to_loss_of(self, folder),
        }


def read_reference(folder: Path) -> Reference:
    """Read what a run ended with.

    Raises:
        ValueError: If there is no such run, or it has not logged losses enough.
    """
    key = f"{_KEY} is {str(folder)!r}, which"
    if not folder.is_dir():
        raise ValueError(f"{key} is no folder; name that of a run")
    if not (folder / LOSSES.name).is_file():
        raise ValueError(f"{key} has no {LOSSES.name}; name that of a run")
    try:
        curve = training_curve(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key} cannot be read: {error}") from error
    loss = last_running_mean(curve, WINDOW)
    seconds = None if loss is None else seconds_to_reach(curve, loss, WINDOW)
    if loss is None or seconds is None:
        raise ValueError(
            f"{key} has {len(curve)} logged training losses; its last {WINDOW} must be there and "
            "be numbers"
        )
    return Reference(folder, loss, seconds, _device(folder))


def reference_errors(config: JobConfig) -> Iterator[str]:
    """Say what is wrong with the reference run, if one is named."""
    if config.report.reference_run is not None:
        try:
            read_reference(Path(config.report.reference_run))
        except ValueError as error:
            yield str(error)


def training_curve(folder: Path) -> list[tuple[float, float]]:
    """Return seconds and loss of each step whose training loss was logged.

    Raises:
        OSError: If there are no losses.
        ValueError: If they cannot be read.
    """
    rows = LOSSES.read(folder)
    return [(row.seconds, row.train_loss) for row in rows if row.train_loss is not None]


def seconds_to_loss_of(reference: Reference, folder: Path) -> float | None:
    """Return when the run in ``folder`` got to the loss of ``reference``; None if it never did."""
    return seconds_to_reach(training_curve(folder), reference.loss, WINDOW)


def _device(folder: Path) -> str | None:
    try:
        device = parse_json((folder / "summary.json").read_bytes()).get("device")
    except (OSError, ValueError, AttributeError):
        return None
    return device if isinstance(device, str) else None
