import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from timelyfreeze.planning import FreezePlan, solve_freeze_ratios
from timelyfreeze.planning import solution as solution_module
from timelyfreeze.planning.solution import (
    RankTimes,
    SolverChoices,
    chosen_plan,
    solution_from_plain,
    solution_to_plain,
    solve_from_times,
    steps_error,
    steps_factor,
)
from timelyfreeze.schedule import one_f_one_b_order
from timelyfreeze.schedule.dag import build_dag, makespan
from timelyfreeze.schedule.order import parse_action, parse_order
from timelyfreeze.settings import AUTO
from timelyfreeze.timing import Energies, uniform_bounds
from timelyfreeze.timing.monitoring import FROZEN, UNFROZEN, PatternTimes

ORDER = parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])


def times(row: str, backward_ms: float) -> dict:
    actions = [parse_action(text) for text in row.split()]
    return {a: [backward_ms if a.kind.value == "B" else 1.0] * 3 for a in actions}


def halves(row: str, unfrozen_ms: tuple = (), frozen_ms: tuple = ()) -> RankTimes:
    """A rank that measured unfrozen and then frozen backwards, and batches of these lengths."""
    return RankTimes(
        (
            PatternTimes(UNFROZEN, times(row, 2.0), unfrozen_ms),
            PatternTimes(FROZEN, times(row, 1.0), frozen_ms),
        )
    )


def rank(row: str, *, span_ms: float | None = None) -> RankTimes:
    spans = () if span_ms is None else (span_ms, span_ms, 10 * span_ms)
    return halves(row, spans)


ROWS = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def test_the_case_solved_by_hand_comes_out_of_measured_times() -> None:
    """9 ms unfrozen, 7 at a cap of 0.5, by freezing 0B1 and 1B0."""
    solution = solve_from_times([rank(row) for row in ROWS], ORDER, SolverChoices(0.5))
    plan = solution.plan
    assert (plan.unfrozen_batch_ms, plan.batch_ms) == (9.0, pytest.approx(7.0))
    assert [str(a) for a, r in zip(plan.actions, plan.ratios, strict=True) if r > 0.5] == [
        "0B1",
        "1B0",
    ]


def test_what_is_beside_batches_is_that_of_the_rank_that_waited_least() -> None:
    first, last = (rank(row) for row in ROWS)
    ranks = [replace(first, outside_ms=(4.0, 90.0, 5.0)), replace(last, outside_ms=(7.0, 8.0))]
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
    assert solution.bounds.outside_ms == solution.plan.outside_ms == 5.0
    assert solve_from_times([first, last], ORDER, SolverChoices(0.5)).plan.outside_ms == 0.0


def test_a_batch_that_took_longer_than_its_actions_gives_messages_a_overhead() -> None:
    """Rank 0 measured 11 ms, two more than 9: its chain F0 -> 1F0 .. -> 0B has two messages."""
    ranks = [rank(ROWS[0], span_ms=11.0), rank(ROWS[1], span_ms=8.0)]
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
    assert solution.plan.unfrozen_batch_ms == pytest.approx(11.0, rel=1e-6)
    assert makespan(solution.dag, solution.bounds.max_ms) == pytest.approx(11.0, rel=1e-6)
    by_name = dict(zip(map(str, solution.dag.actions), solution.bounds.max_ms, strict=True))
    assert by_name["0F0"] == 1.0
    assert by_name["1F0"] > 1.0
    assert by_name["0B0"] - 2.0 == pytest.approx(by_name["1F0"] - 1.0)


def test_the_overhead_of_a_message_is_the_mean_of_both_halves() -> None:
    def planned(unfrozen_ms: tuple[float, ...], frozen_ms: tuple[float, ...]) -> float:
        """Return what the message in front of 1F0 costs; rank 1 is not the last to end."""
        ranks = [
            halves(ROWS[0], unfrozen_ms, frozen_ms),
            halves(ROWS[1], unfrozen_ms[:1], frozen_ms[:1]),
        ]
        solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
        return float(solution.bounds.max_ms[solution.dag.index[parse_action("1F0")]]) - 1.0

    # Two messages in a chain: a batch of 9 that took 11 pays 1 each, one of 6 that took 9 pays 1.5.
    assert planned((11.0,), (9.0,)) == pytest.approx(
        (planned((11.0,), ()) + planned((), (9.0,))) / 2
    )
    assert planned((), ()) == 0.0


def test_the_interval_is_as_wide_as_doubled_messages_make_a_batch() -> None:
    """No scatter; 4 messages of 0.5 ms make 11 of 9 ms and 8 of 6, and of 1 ms they make 13, 10."""
    ranks = [halves(ROWS[0], (11.0,) * 3, (8.0,) * 3), halves(ROWS[1], (6.0,) * 3, (4.0,) * 3)]
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
    assert solution.bounds.p2p_overhead_ms == pytest.approx(0.5)
    assert solution.bounds.interval_factor == pytest.approx(max(13.0 / 11.0, 10.0 / 8.0))


def test_an_estimate_at_its_lowest_is_not_sure_of_itself() -> None:
    """Frozen weights keep little noise and nearly all of the mean gradient."""
    energies = Energies(1.0, 4.0, 1.9, 2.0, 4.0, 4.0, 3.8)
    solution = solve_from_times(
        [replace(rank(row), energies=energies) for row in ROWS], ORDER, SolverChoices(0.5)
    )
    sure = replace(solution.bounds, captured_mean_error=0.0)
    unsure = replace(solution.bounds, captured_mean_error=0.05)
    assert solution.plan.steps_factor == 1.0
    assert steps_error(solution.dag, solution.plan, sure) == pytest.approx(0.05)
    assert steps_error(solution.dag, solution.plan, unsure) > 0.052


def test_without_messages_the_interval_is_that_of_the_batches() -> None:
    ranks = [halves(ROWS[0], (9.0,) * 3, (6.0,) * 3), halves(ROWS[1], (6.0,) * 3, (4.0,) * 3)]
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
    assert solution.bounds.p2p_overhead_ms == 0.0
    assert solution.bounds.interval_factor == pytest.approx(1.0)


def test_what_frozen_weights_keep_is_that_of_all_ranks() -> None:
    ranks = [
        replace(rank(row), energies=found)
        for row, found in zip(
            ROWS, [
                Energies(3.2, 4.0, 2.0, 2.0, 4.0, 4.0, 4.0),
                Energies(4.0, 4.0, 1.0, 2.0, 1.0, 4.0, 2.0),
            ],
            strict=True,
        )
    ]  # fmt: skip
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.5))
    bounds = solution.bounds
    assert (bounds.captured, bounds.captured_mean) == (0.9, 0.75)
    # Two weights, which agree on 2 of 2 and on 1 of 2.
    error = math.hypot(2.0 - 0.75 * 2.0, 1.0 - 0.75 * 2.0) / 4.0
    assert bounds.captured_mean_error == pytest.approx(error)
    replicas = solve_from_times([*ranks, *ranks], ORDER, SolverChoices(0.5)).bounds
    assert replicas.captured_mean_error == pytest.approx(error)
    low, high = (
        steps_factor(solution.dag, solution.plan.ratios, 0.9, 0.75 + sign * error)
        for sign in (1, -1)
    )
    assert low < solution.plan.steps_factor < high
    found = steps_error(solution.dag, solution.plan, bounds)
    # And 0.05 of what runs needed beyond the estimate.
    assert found == pytest.approx(math.hypot((high - low) / 2, 0.05))
    unknown = replace(bounds, captured_mean_error=None)
    assert steps_error(solution.dag, solution.plan, unknown) is None
    older = [replace(each, energies=Energies(*astuple(each.energies)[:4])) for each in ranks]
    found = solve_from_times(older, ORDER, SolverChoices(0.5)).bounds
    assert (found.captured_mean, found.captured_mean_error) == (0.75, None)
    for agreed in ((-1.0, 2.0), (3.0, 2.0), (0.0, 0.0), (-2.0, -1.0)):
        noisy = [
            replace(ranks[0], energies=Energies(2.0, 4.0, *agreed, 1.0, 1.0, 1.0)),
            rank(ROWS[1]),
        ]
        assert solve_from_times(noisy, ORDER, SolverChoices(0.5)).bounds.captured_mean == 0.5
    bounds = solve_from_times(list(map(rank, ROWS)), ORDER, SolverChoices(0.5)).bounds
    assert (bounds.captured, bounds.captured_mean, bounds.captured_mean_error) == (0.0, 0.0, None)


def test_whole_stages_get_ratios_of_zero_or_one() -> None:
    solution = solve_from_times(
        [rank(row) for row in ROWS], ORDER, SolverChoices((0.8, 0.3), whole_stages=(0,))
    )
    ratios = dict(zip(solution.plan.actions, solution.plan.ratios, strict=True))
    assert {r for a, r in ratios.items() if a.stage == 0} <= {0.0, 1.0}
    assert sum(r for a, r in ratios.items() if a.stage == 1) <= 0.3 * 2 + 1e-9


def test_the_plan_is_for_the_order_that_ran(caplog: pytest.LogCaptureFixture) -> None:
    ran = ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]
    solution = solve_from_times([rank(row) for row in ran], ORDER, SolverChoices(0.5))
    assert solution.order == parse_order(ran)
    assert "another order" in caplog.text


def test_text_form_brings_everything_back() -> None:
    ranks = [rank(ROWS[0], span_ms=11.0), rank(ROWS[1], span_ms=8.0)]
    solution = solve_from_times(ranks, ORDER, SolverChoices(0.4))
    again = solution_from_plain(solution_to_plain(solution))
    assert again.order == solution.order
    assert again.dag.actions == build_dag(again.order).actions
    assert np.array_equal(again.bounds.max_ms, solution.bounds.max_ms)
    assert np.array_equal(again.plan.ratios, solution.plan.ratios)
    assert again.plan.batch_ms == solution.plan.batch_ms


DAG = build_dag(one_f_one_b_order(4, 8))
BOUNDS = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))


def times_of(caps: list[float]) -> dict[float, float]:
    """Estimated time to a loss under each cap, by the formula of ``progress``."""
    times = {}
    for cap in caps:
        plan = solve_freeze_ratios(DAG, BOUNDS, max_freeze_ratio=cap)
        mean = np.array(list(plan.stage_mean_ratios().values()))
        steps = np.sqrt(1.0 + (mean / (1.0 - np.minimum(mean, 0.99))).mean())
        times[cap] = plan.batch_ms / plan.unfrozen_batch_ms * steps
    return times


def test_the_cap_is_the_smallest_that_keeps_three_quarters_of_the_best_gain() -> None:
    chosen = chosen_plan(DAG, BOUNDS, SolverChoices(AUTO)).time_to_loss
    assert chosen is not None
    times = times_of(np.linspace(0.02, 0.98, 25).tolist())
    best = 1.0 - min(times.values())
    assert best > 0.03
    assert 1.0 - chosen >= 0.75 * best - 0.005
    tried = times_of([0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    (cap,) = [cap for cap, time in tried.items() if time == pytest.approx(chosen, abs=1e-9)]
    assert all(1.0 - time < 0.75 * best for smaller, time in tried.items() if smaller < cap)


def test_the_more_frozen_weights_keep_the_more_is_frozen() -> None:
    plans = [
        chosen_plan(DAG, replace(BOUNDS, captured=part, captured_mean=part), SolverChoices(AUTO))
        for part in (0.0, 0.4, 1.0)
    ]
    sums = [plan.ratios.sum() for plan in plans]
    assert sums[0] < sums[1] < sums[2]
    times = [plan.time_to_loss for plan in plans]
    assert times == sorted(times, reverse=True)
    shortest = solve_freeze_ratios(DAG, BOUNDS, max_freeze_ratio=1.0)
    assert 1.0 - times[2] >= 0.75 * shortest.gain / (1.0 + shortest.gain)


def test_the_papers_cap_costs_more_than_it_saves() -> None:
    default = chosen_plan(DAG, BOUNDS, SolverChoices(0.8))
    assert default.time_to_loss is not None
    assert default.time_to_loss > 1.0


def test_the_more_is_beside_batches_the_less_is_frozen() -> None:
    plans = [
        chosen_plan(DAG, replace(BOUNDS, outside_ms=outside_ms), SolverChoices(AUTO))
        for outside_ms in (0.0, 8.0, 300.0)
    ]
    sums = [plan.ratios.sum() for plan in plans]
    assert sums[0] >= sums[1] > sums[2]
    times = [plan.time_to_loss for plan in plans]
    assert times == sorted(times), "a batch takes 33 ms"
    assert times[2] > 1.0


def test_all_caps_together_have_the_time_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def noted(*args: Any, time_limit_s: float, **kwargs: Any) -> FreezePlan:
        limits.append(time_limit_s)
        return solve_freeze_ratios(*args, time_limit_s=time_limit_s, **kwargs)

    monkeypatch.setattr(solution_module, "solve_freeze_ratios", noted)
    for most_actions, n_caps in ((1024, 13), (10, 4)):
        limits.clear()
        monkeypatch.setattr(solution_module, "MAX_ACTIONS_BY_SIMPLEX", most_actions)
        chosen_plan(DAG, BOUNDS, SolverChoices(AUTO, time_limit_s=26.0))
        assert len(limits) == n_caps
        assert sum(limits) == pytest.approx(26.0)
