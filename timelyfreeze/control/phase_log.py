"""Tells the phases of a run as they begin, and once that there is no plan to freeze by."""

from __future__ import annotations

import logging

from timelyfreeze.control.known import NOT_MEASURED
from timelyfreeze.settings import Phase, PhaseSchedule, key

logger = logging.getLogger(__name__)


class PhaseLog:
    """Writes to the log what phase a run is in."""

    def __init__(self, phases: PhaseSchedule) -> None:
        self._phases = phases
        self._warned = False

    def tell_phase(self, phase: Phase, step: int) -> None:
        """Tell a phase that begins at ``step``."""
        if phase is Phase.OFF:
            return  # the planner has told, with the reason
        last = None if phase is Phase.STABLE else self._phases.last_step_of(phase)
        until = "the end" if last is None else f"step {last}"
        logger.info("Freezing phase %s from step %d to %s", phase.value, step, until)

    def tell_missing_plan(self, step: int, failure: str | None) -> None:
        """Warn, once, that nothing is frozen although ``step`` should freeze by a plan."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "Nothing is frozen: step %d is past %s (%d) and there is no plan (%s)",
            step,
            key("monitor"),
            self._phases.last_monitor_step,
            failure or NOT_MEASURED,
        )
