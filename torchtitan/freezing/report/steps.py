"""Learning and freezing of a run by step: losses, kappa and p_eff, the front, moves.

Times of a step are known at its end, frozen parts of all ranks at the next exchange of metrics. So
``steps.csv`` is written at logged steps. A killed run loses the rows since then; a failed run loses
none.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from timelyfreeze.control import CollectedMetrics
from timelyfreeze.policies import Decision
from timelyfreeze.records import tables
from timelyfreeze.records.convergence import kappa_over_p_eff, mean_p_eff
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.runtime import ObservedBatch
from timelyfreeze.settings import FREEZING_PHASES, Phase
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, Run, RunPart


class Steps(RunPart):
    """Writes the known values of steps, ``steps.csv``.

    An emulation's virtual times count instead of this process's.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        run.append(tables.STEPS, [])
        # Of steps that were not written yet: what is known of their rows, and which have ended.
        self._known: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self._ended: list[int] = []
        self._n_virtual = 0  # of the ended ones, how many have their virtual time
        self._stable: list[tuple[float, float]] = []

    def begin_pipeline(self) -> None:
        self.close()

    def add_virtual(self, steps_ms: Sequence[float]) -> None:
        """Note the virtual times of the next finished steps."""
        for virtual_ms in steps_ms:
            self._known[self._ended[self._n_virtual]]["virtual_step_ms"] = virtual_ms
            self._n_virtual += 1

    def collect(self, metrics: CollectedMetrics) -> None:
        for step, ratio in metrics.step_ratios.items():
            self._known[step]["freeze_ratio"] = ratio

    def log_step(self, logged: LoggedStep) -> dict[str, float | None]:
        tags: dict[str, float | None] = {}
        known = self._known[logged.step]
        known["train_loss"] = logged.loss
        controller, phase, metrics = self.run.controller, logged.phase, logged.metrics
        if controller is not None and metrics is not None and phase is not None:
            known["batch_predicted_ms"] = controller.expected_batch_ms()
            batches_ms = metrics.batch_ms.get(phase)
            known["batch_ms"] = statistics.median(batches_ms) if batches_ms else None
            among, counted = (
                Phase.STABLE if phase is Phase.CONTROL else phase,
                self.run.counted_steps,
            )
            known["kappa"] = kappa = counted.kappa_since(among)
            # While everything is frozen to measure, it is no gain; where control steps are to come,
            # nothing else is, since the machine may have become slower or faster.
            if among in FREEZING_PHASES and (
                not controller.phases.control_every or counted.paired_kappas()
            ):
                self.run.kappa = kappa or self.run.kappa
            bounds = controller.active_plan.bounds
            captured = 0.0 if bounds is None else bounds.captured
            energy = None if metrics.energy is None else metrics.energy.keeping(captured)
            known["p_eff"] = p_eff = None if energy is None else energy.p_eff
            if phase is Phase.STABLE and energy is not None and p_eff is not None:
                # Each replica has the energy of the whole model.
                self._stable.append((p_eff, energy.total / self.run.n_held))
            tags = {"freezing/kappa": kappa, "freezing/p_eff": p_eff}
            tags["freezing/kappa_over_p_eff"] = kappa_over_p_eff(kappa, p_eff)
        if self.run.emulation is not None:
            tags |= self.run.emulation.metrics()
            self.add_virtual(self.run.emulation.take_steps_ms())
        return tags

    def end_step(self, ended: EndedStep) -> None:
        phase, seconds, known = ended.phase, ended.seconds, self._known[ended.step]
        known["phase"] = "" if phase is None else phase.value
        known["seconds"], known["step_ms"] = self.run.seconds, 1e3 * seconds
        known["tokens_per_second"] = ended.of_device / seconds if seconds > 0.0 else math.nan
        if phase is None:
            known["freeze_ratio"] = 0.0
        self._ended.append(ended.step)
        if "train_loss" in known:
            # The virtual time of this step is not known before metrics are exchanged again.
            self._write(len(self._ended) if self.run.emulation is None else self._n_virtual)
        if self.run.emulation is not None:
            self.run.emulation.end_step(phase, ended.n_tokens)

    def gather(self) -> None:
        if self.run.emulation is not None:
            self.run.emulation.collect()
            self.add_virtual(self.run.emulation.take_steps_ms())

    @property
    def p_eff(self) -> float | None:
        """Average of p_eff over logged steps of the stable phase, Eq. 28; None without."""
        return mean_p_eff(self._stable)

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        """Write all steps, the data of plots and reports."""
        self.close()
        freezes, emulation = self.run.controller is not None, self.run.emulation
        virtual = {} if emulation is None else emulation.summarize(freezes=freezes)
        return {"p_eff": self.p_eff, **virtual}

    def close(self) -> None:
        self._write(len(self._ended))

    def _write(self, n: int) -> None:
        steps, self._ended = self._ended[:n], self._ended[n:]
        self._n_virtual = max(0, self._n_virtual - n)
        rows = [tables.StepRow(step, **self._known.pop(step)) for step in steps]
        self.run.append(tables.STEPS, rows)


# Phases in which a policy's choice is frozen, under a plan or alone.
_IN_FORCE = (Phase.RAMP, Phase.STABLE)


class Front(RunPart):
    """Writes the front in every step, ``front.csv``, and evaluations of modules, if any."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._rows: list[tables.FrontRow] = []
        self._last: Decision | None = None

    def batch(self, observed: ObservedBatch) -> None:
        policy, controller = observed.policy, self.run.controller
        if "frozen_layers" not in policy or controller is None:
            return
        read = int(observed.entry_stage is not None) if controller.cache is not None else None
        if self._rows and self._rows[-1].step == observed.step:
            row = self._rows[-1]
            read = None if read is None or row.read is None else row.read + read
            self._rows[-1] = replace(row, batches=row.batches + 1, read=read)
            return
        names = [name for name in ("frozen_modules", "bootstrapping") if name in policy]
        modules = {name: int(policy[name]) for name in names}
        n_layers = int(policy["frozen_layers"]) if observed.phase in _IN_FORCE else 0
        phase = observed.phase.value
        self._rows.append(tables.FrontRow(observed.step, phase, n_layers, 1, read, **modules))

    def end_step(self, ended: EndedStep) -> None:
        checks = None if self.run.controller is None else self.run.controller.checks
        if checks is None or checks.decision is self._last:
            return
        self._last = checks.decision
        if found := self._last.evaluations:
            rows = [tables.PlasticityRow(e.step, e.module, e.value, e.smoothed) for e in found]
            self.run.append(tables.PLASTICITY, rows)

    def collect(self, metrics: CollectedMetrics) -> None:
        """Write: times of all batches so far have been read."""
        self.close()

    def close(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self.run.append(tables.FRONT, rows)


@dataclass(frozen=True)
class TimedMove:
    """A move and its results."""

    move: tables.Move  # to which pipeline, and when
    # median step of the pipeline that was left, without its first ones, which run cold; None if it
    # had no other
    before_ms: float | None
    after_ms: float | None  # likewise of the pipeline that came


def timed_moves(run: Run) -> list[TimedMove]:
    """Return the moves so far, the oldest first."""
    pairs = pairwise(run.counted_steps.medians_ms())
    return [TimedMove(move, *pair) for move, pair in zip(run.moves, pairs, strict=True)]


class Moves(RunPart):
    """Writes moves to other pipelines at once, ``moves.csv``."""

    def log_step(self, logged: LoggedStep) -> dict[str, float | None]:
        controller = self.run.controller
        if controller is None or not self.run.config.freezing.elastic.enable:
            return {}
        return {
            "freezing/elastic/ranks": controller.active_plan.order.n_ranks,
            "freezing/elastic/replicas": self.run.n_replicas,
        }

    def move(self, move: tables.Move) -> None:
        self.run.moves.append(move)
        self.run.append(tables.MOVES, [move])

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        if self.run.controller is None or not self.run.config.freezing.elastic.enable:
            return {}
        moves = self.run.moves
        return {"moves": len(moves), "moves_seconds": sum(move.seconds for move in moves)}


class Counts(RunPart):
    """Writes the frozen counts of tensors, ``frozen_counts.csv``."""

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        if self.run.controller is None:
            return {}
        self.run.frozen_counts = counts = self.run.controller.frozen_counts()
        self.run.append(tables.COUNTS, counts)
        return tables.never_updated(counts)
