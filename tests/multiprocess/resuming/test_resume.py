"""A run stopped in any phase and resumed equals, bit for bit, one that never stopped.

Durations are the one input that cannot repeat, so the recorder's times are replaced by fixed ones.
The ranks are emulated; ``test_emulation.py`` goes on with real ones.
"""

import pytest
from launcher import EMULATED, arguments, asked_for, assert_goes_on, run_scenarios
from methods import ROWS, STEPS

# Places to stop at; the phases are those of the table of methods. Policies check at even steps.
PLACES = {"warm-up": 1, "upper bound": 3, "lower bound": 5, "solved": 6, "ramp": 8, "stable": 11}
UNPLANNED_PLACES = {"end of warm-up": 2, "between checks": 5, "check": 8}
# In one place on every schedule; in all of them on one with a full and one with a split backward.
ONE_PLACE = {"on the way": 8}
THOROUGH = ["1F1B", "ZBVZeroBubble"]
SCHEDULES = [*THOROUGH, "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]
# What is not marked long: one place a method, all places of the one that has most to keep.
MOST_TO_KEEP = "timelyfreeze+apf"


def places(row, schedule):
    if schedule not in THOROUGH:
        return ONE_PLACE
    return PLACES if row.plans else UNPLANNED_PLACES


def marks(row, schedule, place=None):
    """Return a mark for what takes long; ``place`` is None for the run that is not stopped."""
    is_short = place is None or row.method == MOST_TO_KEEP or places(row, schedule)[place] == 8
    # A policy alone freezes all microbatches alike, however their backwards are split.
    chosen = THOROUGH[1] if row.plans else THOROUGH[0]
    return [] if schedule == chosen and is_short else [pytest.mark.long]


CASES = [
    pytest.param(
        row,
        schedule,
        place,
        id=f"{row.method} {schedule} {place}",
        marks=marks(row, schedule, place),
    )
    for row in ROWS
    for schedule in SCHEDULES
    for place in places(row, schedule)
]
WHOLE = [
    pytest.param(row, schedule, id=f"{row.method} {schedule}", marks=marks(row, schedule))
    for row in ROWS
    for schedule in SCHEDULES
]


def freezing_arguments(row, schedule, **more):
    return arguments(
        model__flavor="short",
        parallelism__pipeline_parallel_degree=2,
        parallelism__pipeline_parallel_microbatch_size=2,
        parallelism__pipeline_parallel_schedule=schedule,
        training__steps=STEPS,
        training__global_batch_size=16 if row.method == MOST_TO_KEEP else 8,
        checkpoint__enable=None,
        checkpoint__keep_latest_k=0,
        checkpoint__no_last_save_model_only=None,
        **EMULATED,
        **row.arguments,
        **more,
    )


def name_of(row, schedule):
    return f"{row.method} {schedule}"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    scenarios = {
        name_of(row, schedule): {
            "name": name_of(row, schedule),
            "module": row.module,
            "fake_clock": True,
            "save_at": [],
            "args": freezing_arguments(row, schedule),
        }
        for row, schedule in asked_for(request, "row", "schedule")
    }
    for row, schedule, place in asked_for(request, "row", "schedule", "place"):
        name, step = name_of(row, schedule), places(row, schedule)[place]
        whole = scenarios[name]
        whole["save_at"].append(step)
        resumed = {
            "name": f"{name} from {place}",
            "after": name,
            "fixed_weights": False,
            "save_at": [],
            "args": freezing_arguments(
                row,
                schedule,
                checkpoint__initial_load_path=folder / name / "checkpoint" / f"step-{step}",
                checkpoint__no_initial_load_model_only=None,
                checkpoint__load_only=None,
            ),
        }
        scenarios[resumed["name"]] = {**whole, **resumed}
    return run_scenarios(folder, 1, list(scenarios.values()), timeout_s=1700)


@pytest.mark.parametrize(("row", "schedule", "place"), CASES)
def test_resumed_run_equals_undisturbed(runs, row, schedule, place):
    name, stopped_at = name_of(row, schedule), places(row, schedule)[place]
    assert_goes_on(runs[name], runs[f"{name} from {place}"], stopped_at)


@pytest.mark.parametrize(("row", "schedule"), WHOLE)
def test_undisturbed_run_freezes(runs, row, schedule):
    """Without this the test above could pass on runs that never froze anything."""
    whole = runs[name_of(row, schedule)]
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
    if row.plans:
        for seen in whole:
            frozen = {}
            for step, _, masks in seen["masks"]:
                frozen.setdefault(step, []).extend(any(mask) for mask in masks.values())
            assert not any(any(frozen.get(step, [])) for step in (1, 2, 3, 4))
            assert all(frozen[5])
            assert all(frozen[6])
            assert sum(seen["plan"].values()) > 0
