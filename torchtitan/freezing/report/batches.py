"""Records of a run's batches: typical timelines, a sample of the backwards, the padding."""

import statistics
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.tools.logging import logger

from timelyfreeze.planning import FreezePlan
from timelyfreeze.records.seen_batch import SeenBatch, measured_timeline
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.records.tables import RESPONSES, ResponseRow
from timelyfreeze.records.timeline import timeline_file, timeline_to_json
from timelyfreeze.runtime import ObservedBatch
from timelyfreeze.settings import Phase
from timelyfreeze.timing import DurationBounds
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, RunPart
from torchtitan.freezing.report.run_folder import number_former

# Batches of a phase among which the typical one is looked for: the last ones, so many at most. In a
# phase without end the first example is written as soon as there are so many.
_MOST_KEPT = 16
_ENOUGH = 8
_ENDLESS = (Phase.STABLE, Phase.OFF)


class Timelines(RunPart):
    """Keeps a few batches of the current phase, and writes one at its end.

    The ramp is left out: no two of its steps freeze alike. So are control steps. Phases without end
    get an example early, replaced at their end, when more is frozen.
    """

    def begin_pipeline(self) -> None:
        self._kept: dict[Phase, deque[ObservedBatch]] = {}
        self._current: Phase | None = None
        self._written: set[Phase] = set()

    def batch(self, observed: ObservedBatch) -> None:
        phase = observed.phase
        if phase is Phase.CONTROL:
            return
        self._current = phase
        is_wanted = phase in _ENDLESS or (phase is not Phase.RAMP and phase not in self._written)
        if is_wanted and not observed.is_cold and observed.record.intervals_ms:
            self._kept.setdefault(phase, deque(maxlen=_MOST_KEPT)).append(observed)

    def begin_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        """Number the file of the former plan's batches."""
        self._kept.pop(Phase.STABLE, None)
        if Phase.STABLE in self._written and self.run.is_shown:
            file = timeline_file(self.run.folder, Phase.STABLE)
            with self.run.writing():
                number_former(file.parent, [file.name])
        self._written.discard(Phase.STABLE)

    def log_step(self, logged: LoggedStep) -> None:
        self._write_due(is_last=False)

    def gather(self) -> None:
        """Write all remaining timelines: every phase is over."""
        self._write_due(is_last=True)

    def _write_due(self, *, is_last: bool) -> None:
        """Write due timelines; a collective call at the same step."""
        for phase in [phase for phase in Phase if phase in self._kept]:
            is_first = phase in _ENDLESS and phase not in self._written
            is_enough = is_first and len(self._kept[phase]) >= _ENOUGH
            if not (is_last or is_enough or phase is not self._current):
                continue
            self._write(phase, list(self._kept[phase]))
            self._written.add(phase)
            self.run.has_news = True
            if phase is not self._current:
                del self._kept[phase]

    def _write(self, phase: Phase, batches: list[ObservedBatch]) -> None:
        run, controller = self.run, self.run.controller
        assert controller is not None  # it has told of the batches
        order, bounds = controller.active_plan.order, controller.active_plan.bounds
        # Those that began where most did; of several such places the latest counts.
        entries = Counter(observed.entry_stage for observed in reversed(batches))
        ((entry_stage, _),) = entries.most_common(1)
        batches = [observed for observed in batches if observed.entry_stage == entry_stage]
        everyone = run.exchange.all_gather([observed.record.span_ms for observed in batches])
        chosen = batches[typical(everyone)]
        processes = run.exchange.all_gather(
            SeenBatch(chosen.record.intervals_ms, dict(chosen.fractions))
        )
        if not run.is_shown:
            return
        latency_ms = None if bounds is None else bounds.p2p_latency_ms
        more: dict[str, Any] = {"step": chosen.step, "entry_stage": entry_stage}
        try:
            timeline = measured_timeline(order, processes, phase, p2p_latency_ms=latency_ms, **more)
        except ValueError as error:
            logger.warning("There will be no timeline of phase %s: %s", phase.value, error)
            return
        run.write(str(timeline_file(Path(), phase)), timeline_to_json(timeline))


def typical(spans_ms: list[list[float]]) -> int:
    """Return the batch with the median time on its slowest rank."""
    slowest = [max(spans) for spans in zip(*spans_ms, strict=True)]
    return slowest.index(statistics.median_low(slowest))


class Responses(RunPart):
    """A fair sample of stages' warm backwards by phase, by Vitter's algorithm R.

    The sample depends on the order of batches alone, so a repeated run keeps the same.
    """

    n_kept = 120  # of each stage, kind and phase

    def begin_pipeline(self) -> None:
        self.kept: dict[tuple[int, str, str], list[ResponseRow]] = {}
        self._n_seen: Counter[tuple[int, str, str]] = Counter()
        self._rng = np.random.default_rng(0)

    def gather(self) -> None:
        """Write all ranks' samples, ``responses.csv``."""
        if self.run.controller is None:
            return
        everyone = self.run.exchange.all_gather(self.kept)
        kept = {key: rows for rank in reversed(everyone) for key, rows in rank.items()}
        self.run.append(RESPONSES, [row for key in sorted(kept) for row in kept[key]])

    def batch(self, observed: ObservedBatch) -> None:
        if observed.is_cold:
            return
        for action, fraction in observed.fractions.items():
            row = ResponseRow(
                action.stage, action.kind.value, observed.phase.value, action.microbatch,
                fraction, observed.record.durations_ms[action], int(action in observed.cut),
            )  # fmt: skip
            key = (row.stage, row.kind, row.phase)
            kept = self.kept.setdefault(key, [])
            self._n_seen[key] += 1
            if self._n_seen[key] <= self.n_kept:
                kept.append(row)
            elif (place := int(self._rng.integers(self._n_seen[key]))) < self.n_kept:
                kept[place] = row


class Padding(RunPart):
    """Counts the padding of examples; after the first step the log tells of much of it."""

    _n_read = _n_padding = 0
    _is_new = True

    def read(self, n_tokens: int, n_padding: int) -> None:
        self._n_read += n_tokens
        self._n_padding += n_padding

    def end_step(self, ended: EndedStep) -> None:
        if self._is_new and self._n_read and self.run.is_shown:
            share = self._n_padding / self._n_read
            if told := replace(self.run.start, padding=share).padding_told:
                logger.info(told)
        self._is_new = False

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        """Return the share of padding read by all processes; None for other data."""
        counts = self.run.exchange.all_gather((self._n_read, self._n_padding))
        n_read, n_padding = map(sum, zip(*counts, strict=True))
        return {"padding": n_padding / n_read if n_read else None}
