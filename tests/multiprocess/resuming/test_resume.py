"""A run stopped in any phase and resumed equals, bit for bit, one that never stopped.

Durations are the one input that cannot repeat, so the recorder's times are replaced by fixed ones.
The ranks are emulated; ``test_emulation.py`` goes on with real ones.
"""

import pytest
from launcher import assert_goes_on
from method_runs import MOST_TO_KEEP
from methods import ROW, ROWS

# Places to stop at; the phases are those of the table of methods. Policies check at even steps.
PLACES = {"warm-up": 1, "upper bound": 3, "lower bound": 5, "solved": 6, "ramp": 8, "stable": 11}
UNPLANNED_PLACES = {"end of warm-up": 2, "between checks": 5, "check": 8}
# In one place on every schedule; in all of them on one with a full and one with a split backward.
ONE_PLACE = {"on the way": 8}
THOROUGH = ["1F1B", "ZBVZeroBubble"]
SCHEDULES = [*THOROUGH, "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]
# What is not marked long: one place a method, three of the one that has most to keep, and none of
# methods that keep nothing, or nothing that this one does not keep.
SHORT_PLACES = ("upper bound", "solved", "ramp")
LITTLE_TO_KEEP = ["timelyfreeze", "timelyfreeze+fixed", "fixed"]


def places(row, schedule):
    if schedule not in THOROUGH:
        return ONE_PLACE
    return PLACES if row.plans else UNPLANNED_PLACES


def marks(row, schedule, place=None):
    """Return a mark for what takes long; ``place`` is None for the run that is not stopped."""
    is_short = place is None or places(row, schedule)[place] == 8
    is_short |= row.method == MOST_TO_KEEP and place in SHORT_PLACES
    # A policy alone freezes all microbatches alike, however their backwards are split.
    chosen = THOROUGH[1] if row.plans else THOROUGH[0]
    is_short &= schedule == chosen and row.method not in LITTLE_TO_KEEP
    return [] if is_short else [pytest.mark.long]


CASES = [
    pytest.param(
        row.method,
        schedule,
        step,
        id=f"{row.method} {schedule} {place}",
        marks=marks(row, schedule, place),
    )
    for row in ROWS
    for schedule in SCHEDULES
    for place, step in places(row, schedule).items()
]
WHOLE = [
    pytest.param(row.method, schedule, id=f"{row.method} {schedule}", marks=marks(row, schedule))
    for row in ROWS
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("method", "schedule", "step"), CASES)
def test_resumed_run_equals_undisturbed(method_runs, method, schedule, step):
    name = f"{method} {schedule}"
    assert_goes_on(method_runs[name], method_runs[f"{name} from {step}"], step)


@pytest.mark.parametrize(("method", "schedule"), WHOLE)
def test_undisturbed_run_freezes(method_runs, method, schedule):
    """Without this the test above could pass on runs that never froze anything."""
    whole = method_runs[f"{method} {schedule}"]
    stable = [
        mask
        for seen in whole
        for step, _, masks in seen["masks"]
        if step > 9
        for mask in masks.values()
    ]
    assert any(any(mask) for mask in stable)
    n_backwards = sum(len(seen["sizes"]) for seen in whole) * 4
    assert any(not all(mask) for mask in stable) or len(stable) < 2 * 4 * n_backwards
    if ROW[method].plans:
        for seen in whole:
            frozen = {}
            for step, _, masks in seen["masks"]:
                frozen.setdefault(step, []).extend(any(mask) for mask in masks.values())
            assert not any(any(frozen.get(step, [])) for step in (1, 2, 3, 4))
            assert all(frozen[5])
            assert all(frozen[6])
            assert sum(seen["plan"].values()) > 0
