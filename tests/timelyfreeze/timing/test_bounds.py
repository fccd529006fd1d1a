import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds, random_order
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan
from timelyfreeze.schedule.order import Action, one_f_one_b_order, parse_action, parse_order
from timelyfreeze.timing.bounds import (
    DurationBounds,
    bounds_from_json,
    bounds_from_samples,
    bounds_to_json,
    uniform_bounds,
    validate_bounds,
)

Samples = dict[Action, list[float]]


@pytest.fixture
def dag() -> PipelineDag:
    return build_dag(parse_order(["0F0 0I0 0W0 0F1 0B1"]))


@pytest.fixture
def unfrozen(dag: PipelineDag) -> Samples:
    times = {"0F0": [1, 9, 2], "0I0": [3, 4], "0W0": [5, 6, 90], "0F1": [1], "0B1": [8, 10]}
    return {parse_action(a): [float(x) for x in times[a]] for a in map(str, dag.actions)}


@pytest.fixture
def frozen(dag: PipelineDag) -> Samples:
    times = {"0F0": [3, 4], "0I0": [5], "0W0": [0], "0F1": [2], "0B1": [4, 5, 7, 60]}
    return {parse_action(a): [float(x) for x in times[a]] for a in map(str, dag.actions)}


def test_medians_by_hand(dag: PipelineDag, unfrozen: Samples, frozen: Samples) -> None:
    bounds = bounds_from_samples(dag, unfrozen, frozen)
    # F and I pool both halves: {1, 9, 2, 3, 4} -> 3, {3, 4, 5} -> 4, {1, 2} -> 1.5.
    assert bounds.max_ms.tolist() == [3.0, 4.0, 6.0, 1.5, 9.0]
    assert bounds.min_ms.tolist() == [3.0, 4.0, 0.0, 1.5, 6.0]
    assert bounds.pinned == ()
    validate_bounds(dag, bounds)


@pytest.mark.parametrize("fast", [9.0, 9.5])
def test_what_is_no_faster_frozen_is_pinned_and_listed(
    dag: PipelineDag, unfrozen: Samples, frozen: Samples, fast: float
) -> None:
    backward = parse_action("0B1")
    bounds = bounds_from_samples(dag, unfrozen, {**frozen, backward: [fast]})
    i = dag.index[backward]
    assert bounds.min_ms[i] == bounds.max_ms[i] == 9.0
    assert bounds.pinned == (backward,)
    validate_bounds(dag, bounds)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
@pytest.mark.parametrize("half", ["unfrozen", "frozen"])
def test_refuses_a_bad_sample(
    dag: PipelineDag, unfrozen: Samples, frozen: Samples, half: str, value: float
) -> None:
    (unfrozen if half == "unfrozen" else frozen)[parse_action("0I0")].append(value)
    with pytest.raises(ValueError, match=f"action 0I0 has a {half} sample of {value} ms") as error:
        bounds_from_samples(dag, unfrozen, frozen)
    assert "monitor" in str(error.value)


@pytest.mark.parametrize("half", ["unfrozen", "frozen"])
@pytest.mark.parametrize("missing", [True, False])
def test_refuses_an_action_without_samples(
    dag: PipelineDag, unfrozen: Samples, frozen: Samples, half: str, missing: bool
) -> None:
    samples = unfrozen if half == "unfrozen" else frozen
    samples[parse_action("0F1")] = []
    if missing:
        del samples[parse_action("0F1")]
    with pytest.raises(ValueError, match=f"0F1 has no {half} sample.*monitor"):
        bounds_from_samples(dag, unfrozen, frozen)


def test_refuses_samples_of_another_schedule(
    dag: PipelineDag, unfrozen: Samples, frozen: Samples
) -> None:
    frozen[parse_action("1B0")] = [1.0]
    with pytest.raises(ValueError, match="1B0 has frozen samples but is not in the schedule"):
        bounds_from_samples(dag, unfrozen, frozen)


def test_uniform_bounds(dag: PipelineDag) -> None:
    bounds = uniform_bounds(
        dag, forward_ms=1.0, backward_ms=(2.0, 3.0), input_ms=4.0, weight_ms=(5.0, 6.0)
    )
    assert bounds.min_ms.tolist() == [1.0, 4.0, 5.0, 1.0, 2.0]
    assert bounds.max_ms.tolist() == [1.0, 4.0, 6.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="action 0I0 exists but no duration"):
        uniform_bounds(dag, forward_ms=1.0, backward_ms=(2.0, 3.0), weight_ms=(5.0, 6.0))
    with pytest.raises(ValueError, match=r"action 0B1: 3.0 ms frozen, 2.0 ms unfrozen"):
        uniform_bounds(
            dag, forward_ms=1.0, backward_ms=(3.0, 2.0), input_ms=4.0, weight_ms=(5.0, 6.0)
        )


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ([1.0] * 4, [1.0] * 5, r"min_ms has shape \(4,\)"),
        ([1.0] * 5, [1.0] * 6, r"max_ms has shape \(6,\)"),
        ([1.0] * 4 + [2.0], [1.0] * 5, "0B1: 2.0 ms frozen, 1.0 ms unfrozen; it may not take"),
        ([0.5] + [1.0] * 4, [1.0] * 5, "0F0: 0.5 ms frozen, 1.0 .* computes no weight gradient"),
        ([1.0, 0.5, 1.0, 1.0, 1.0], [1.0] * 5, "0I0: 0.5 ms frozen.*no weight gradient"),
        ([1.0] * 5, [1.0] * 4 + [float("nan")], "max_ms of action 0B1 is nan"),
    ],
)
def test_validate_refuses(
    dag: PipelineDag, low: list[float], high: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate_bounds(dag, DurationBounds(np.array(low), np.array(high)))


@given(st.integers(0, 10**6))
def test_json_round_trip_is_exact(seed: int) -> None:
    dag = build_dag(random_order(seed))
    made = random_bounds(dag, seed)
    bounds = DurationBounds(made.min_ms, made.max_ms, pinned=dag.actions[-1:])
    again = bounds_from_json(dag, bounds_to_json(dag, bounds))
    assert again.min_ms.tolist() == bounds.min_ms.tolist()
    assert again.max_ms.tolist() == bounds.max_ms.tolist()
    assert again.pinned == bounds.pinned


def test_json_has_one_line_per_action() -> None:
    dag = build_dag(hand_order("two_by_two"))
    text = bounds_to_json(dag, uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.5)))
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert '"1B0": {"min_ms": 1.0, "max_ms": 2.5}' in lines


def test_json_of_another_schedule_is_refused(dag: PipelineDag) -> None:
    other = build_dag(hand_order("two_by_two"))
    text = bounds_to_json(other, uniform_bounds(other, forward_ms=1.0, backward_ms=(1.0, 2.0)))
    with pytest.raises(ValueError, match="do not have the same actions: 0B0 is in only one"):
        bounds_from_json(dag, text)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bounds": {"0F0": 3}, "pinned": []}'])
def test_other_json_is_refused(dag: PipelineDag, text: str) -> None:
    with pytest.raises(ValueError, match="not the text of duration bounds"):
        bounds_from_json(dag, text)


def test_json_is_checked_like_any_bounds(dag: PipelineDag) -> None:
    bounds = uniform_bounds(
        dag, forward_ms=1.0, backward_ms=(2.0, 3.0), input_ms=4.0, weight_ms=(5.0, 6.0)
    )
    data = json.loads(bounds_to_json(dag, bounds))
    data["bounds"]["0B1"]["min_ms"] = 7.0
    with pytest.raises(ValueError, match=r"action 0B1: 7.0 ms frozen, 3.0 ms unfrozen"):
        bounds_from_json(dag, json.dumps(data))


def test_noise_between_alike_microbatches_is_not_planned_with() -> None:
    """Plans for noisy times of alike microbatches come nearer to what the batch then takes."""
    dag = build_dag(one_f_one_b_order(4, 8))
    longest = np.array([2.0 if action.kind.freezable else 1.0 for action in dag.actions])
    shortest = np.where(dag.freezable, 1.0, longest)
    missed, missed_by_medians = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        unfrozen, frozen = (
            {
                action: (ms * rng.normal(1.0, 0.05, 8)).tolist()
                for action, ms in zip(dag.actions, durations, strict=True)
            }
            for durations in (longest, shortest)
        )
        found = bounds_from_samples(dag, unfrozen, frozen)
        plain = DurationBounds(
            *(
                np.array(
                    [
                        np.median(own[a] if a.kind.freezable else unfrozen[a] + frozen[a])
                        for a in dag.actions
                    ]
                )
                for own in (frozen, unfrozen)
            )
        )
        for bounds, misses in ((found, missed), (plain, missed_by_medians)):
            plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
            taken_ms = makespan(dag, longest - plan.ratios * (longest - shortest))
            misses.append(taken_ms / plan.batch_ms - 1.0)
    assert np.mean(missed_by_medians) > 0.0
    assert abs(np.mean(missed)) < 0.7 * np.mean(missed_by_medians)
