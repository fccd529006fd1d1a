"""A machine whose times move in the stable phase, and a run that is to notice."""

import pytest

from tests.timelyfreeze.helpers.ranks import linear_ms
from timelyfreeze.schedule.order import Action, one_f_one_b_order, parse_order
from timelyfreeze.settings.phases import PhaseSchedule

ORDER = one_f_one_b_order(2, 4)
# One rank, so that a batch is the sum of its actions: stub stages do not act out waiting.
ALONE = parse_order(["0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"])
# Warm-up 1-2, upper bound 3-4, lower bound 5-6, ramp 7-8, then stable; times compared at 12, 16, ..
PHASES = PhaseSchedule(2, 6, 8)
EXACT = {"phases": PHASES, "replan_every": 4, "discard_batches": 0}


class Machine:
    """Durations of which the test can change the speed of a stage, and what freezing saves."""

    def __init__(self) -> None:
        self.drift = {0: 1.0, 1: 1.0}
        self.freezing_saves = 1.0

    def __call__(self, action: Action, fraction: float) -> float:
        return linear_ms(action, fraction * self.freezing_saves) * self.drift[action.stage]


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]
