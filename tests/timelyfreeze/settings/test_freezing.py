"""Words and numbers a user may choose from."""

import re
from dataclasses import replace
from typing import Any

import pytest

from timelyfreeze.settings.freezing import FreezeSettings
from timelyfreeze.settings.phases import PhaseSchedule

SHORT = FreezeSettings(1, 5, "halves", 7, discard_batches=1)


def errors(plans: bool = True, **keys: Any) -> list[str]:
    return list(replace(SHORT, **keys).errors(plans=plans))


def test_all_errors_are_told_at_once() -> None:
    words = {"first_stage": "half", "score_memory": "host", "score_dtype": "int8"}
    assert errors(**words, max_freeze_ratio=2.0, last_ramp_step=5) == [
        "first_stage is 'half'; known: all_or_nothing, per_tensor",
        "score_dtype is 'int8'; known: float32, bfloat16",
        "max_freeze_ratio is 2.0; it must lie in [0, 1]",
        "last_ramp_step is 5; it must be above last_monitor_step (5)",
    ]


def test_the_defaults_are_right() -> None:
    assert list(FreezeSettings().errors(n_stages=4)) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"solver_delay_steps": -1},
            "solver_delay_steps is -1; it must be 0 or more and below the 2",
        ),
        ({"solver_delay_steps": 2}, "solver_delay_steps is 2; .* the 2 steps of the ramp"),
        ({"last_monitor_step": 1, "last_ramp_step": 1}, "last_monitor_step is 1, as last_warmup_"),
        (
            {"last_monitor_step": 3, "monitoring": "mixed", "discard_batches": 0},
            r"last_monitor_step is 3; it must be at least 3 above last_warmup_step \(1\), to",
        ),
        ({"discard_batches": 2}, "discard_batches is 2; it must be below the 2 batches of each"),
        ({"discard_batches": 2, "monitoring": "mixed"}, ".* leave 3 of the 4 batches of mixed"),
        ({"gradient_rank": -1}, "gradient_rank is -1; it must be a whole number"),
        ({"gradient_rank": "most"}, "gradient_rank is 'most'; it must be .*, or \"auto\"$"),
        ({"gradient_rank": []}, ".* a list of some above 0, ascending"),
        ({"gradient_rank": [0, 8]}, r"gradient_rank is \[0, 8\]; it must be"),
        ({"gradient_rank": [8, 4]}, r"gradient_rank is \[8, 4\]; it must be"),
        ({"max_freeze_ratio": []}, r"max_freeze_ratio is \[\]; it needs one value"),
        ({"max_freeze_ratio": float("nan")}, r"max_freeze_ratio is nan; it must lie in \[0, 1\]$"),
        ({"max_freeze_ratio": "most"}, r"max_freeze_ratio is 'most'; .* \[0, 1\] or be \"auto\"$"),
    ],
)
def test_numbers_that_leave_planning_no_room_are_told(numbers: dict, message: str) -> None:
    (error,) = errors(**numbers)
    assert re.match(message, error), error


def test_a_method_without_a_plan_needs_no_room() -> None:
    assert errors(False, last_monitor_step=0, solver_delay_steps=5, max_freeze_ratio=2.0) == []
    assert errors(False, score_memory="disk") == ["score_memory is 'disk'; known: device, host"]
    assert errors(solver_delay_steps=1, replan_every=0, min_gain=-1.0) == []
    assert SHORT.unplanned.phases == PhaseSchedule.unplanned(1)
