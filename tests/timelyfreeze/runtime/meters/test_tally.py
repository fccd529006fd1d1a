"""Masks counted by hand: stage 0 has tensors of 10 and 30 elements, stage 1 one of 60."""

import numpy as np

from timelyfreeze.policies.selection import ParameterTable, build_parameter_table
from timelyfreeze.runtime.meters.update_meter import UpdateMeter, step_ratios
from timelyfreeze.settings.phases import Phase, Step

TABLES: dict[int, ParameterTable] = {
    0: build_parameter_table([("a", 10), ("b", 30)]),
    1: build_parameter_table([("c", 60)]),
}


def masks(*stages: dict[int, list[bool]]) -> dict[int, dict[int, np.ndarray]]:
    return {s: {m: np.array(mask) for m, mask in of.items()} for s, of in enumerate(stages)}


FIRST = masks({0: [True, False], 2: [True, True]}, {})
SECOND = masks({1: [False, True]}, {0: [True], 1: [True], 2: [True]})


def tally_of(steps: list[tuple[int, Phase]]) -> UpdateMeter:
    """Each step has a pass of three microbatches with each of the two masks above."""
    tally = UpdateMeter(TABLES, n_microbatches=3)
    entered = None
    for step, phase in steps:
        tally.begin_step(Step(step, phase, phase is not entered))
        tally.end_batch(0, FIRST)
        tally.end_batch(0, SECOND)
        tally.end_step(Step(step))
        entered = phase
    return tally


def plain(counts: dict) -> dict[int, tuple[int, list[int]]]:
    return {stage: (c.backwards, c.frozen.tolist()) for stage, c in counts.items()}


def test_every_backward_counts_for_every_tensor() -> None:
    tally = tally_of([(1, Phase.RAMP)])
    once = {0: (6, [2, 2]), 1: (6, [3])}
    assert plain(tally.step) == plain(tally.since_freezing) == plain(tally.take_recent()) == once
    assert np.allclose(tally.step[0].update_frequency, [4 / 6, 4 / 6])
    assert np.allclose(tally.step_frequency, [4 / 6, 4 / 6, 3 / 6])
    assert plain(tally.take_recent()) == {0: (0, [0, 0]), 1: (0, [0])}


def test_only_phases_that_freeze_by_choice_count_since_freezing_began() -> None:
    steps = list(enumerate(Phase, start=1))
    tally = tally_of(steps)
    assert plain(tally.since_freezing) == {0: (24, [8, 8]), 1: (24, [12])}
    assert tally.since_freezing[0].backwards == 6 * 4, "ramp, stable, control, off"


def test_recent_counts_begin_anew_with_a_phase() -> None:
    tally = tally_of([(1, Phase.RAMP), (2, Phase.STABLE), (3, Phase.STABLE)])
    assert plain(tally.take_recent())[1] == (12, [6])


def test_a_backward_that_did_not_run_froze_nothing() -> None:
    tally = UpdateMeter(TABLES, 3)
    tally.begin_step(Step(1, Phase.WARMUP))
    assert tally.step[0].update_frequency.tolist() == [1.0, 1.0]
    assert step_ratios([tally.take_steps()]) == {}


def test_the_ratio_of_a_step_is_by_elements_over_all_ranks() -> None:
    tally = tally_of([(4, Phase.STABLE)])
    # 2 * 10 + 2 * 30 + 3 * 60 of 6 * 100 elements
    assert step_ratios([tally.take_steps()]) == {4: 260 / 600}
    ranks = [{1: (10, 40), 2: (0, 40)}, {1: (60, 60)}]
    assert step_ratios(ranks) == {1: 0.7, 2: 0.0}


def test_a_step_that_is_asked_for_before_it_ends_is_told_as_it_ended() -> None:
    tally = UpdateMeter(TABLES, 3)
    tally.begin_step(Step(1, Phase.RAMP))
    tally.end_batch(0, FIRST)
    assert tally.take_steps() == {1: (50, 300)}
    tally.end_step(Step(1))
    tally.begin_step(Step(2, Phase.RAMP))
    tally.end_batch(0, masks({}, {}))
    assert list(tally.take_steps()) == [1, 2]


def test_counts_come_back_from_a_checkpoint() -> None:
    tally = tally_of([(1, Phase.STABLE)])
    other = UpdateMeter(TABLES, 3)
    other.load_plain_state(tally.plain_state())
    other.begin_step(Step(2, Phase.STABLE))
    other.end_batch(0, FIRST)
    assert plain(other.since_freezing) == {0: (9, [4, 3]), 1: (9, [3])}
