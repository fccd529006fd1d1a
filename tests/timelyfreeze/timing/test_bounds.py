import json
import math

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
    less_noisy_medians,
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


def group(truth: list[float], noise: float, n_samples: int, seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(value, noise, n_samples).tolist() for value in truth]


def medians(samples: list[list[float]]) -> np.ndarray:
    return np.array([np.median(values) for values in samples])


def test_a_group_by_hand() -> None:
    # Medians 9, 10, 11 and 14 lie 4, 1, 0 and 9 from their mean 11, squared: 14 in all. Samples lie
    # 0, 1 and 1 from their medians, each of which has sqrt(3 / 2) to make up for.
    samples = [[value - 1.0, value, value + 1.0] for value in (9.0, 10.0, 11.0, 14.0)]
    noise = (1.4826 * math.sqrt(1.5)) ** 2 * (math.pi / 2) / 3
    kept = 1.0 - 1.0 * noise / 14.0
    expected = [11.0 + kept * off for off in (-2.0, -1.0, 0.0, 3.0)]
    assert less_noisy_medians(samples) == pytest.approx(expected)


def test_noise_that_explains_everything_leaves_the_mean() -> None:
    samples = [[value - 9.0, value, value + 9.0] for value in (10.0, 10.5, 11.0, 10.5)]
    assert less_noisy_medians(samples) == pytest.approx([10.5] * 4)


@pytest.mark.parametrize(
    "samples",
    [
        [[1.0], [2.0], [3.0], [4.0]],  # whose noise nobody knows
        [[1.0, 1.5, 1.1], [2.0, 2.5, 2.2], [3.0, 3.1, 3.2]],  # too few
        [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]],  # without noise
        [[5.0, 6.0], [5.0, 6.0], [5.0, 6.0], [5.0, 6.0]],  # without differences
        [[1.0, 1.2, 1.1], [2.0, 2.2, 2.1], [3.0], [4.0, 4.1, 4.2]],
    ],
)
def test_plain_medians_stay_where_noise_is_unknown_or_none(samples: list[list[float]]) -> None:
    assert less_noisy_medians(samples).tolist() == medians(samples).tolist()


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_alike_actions_are_nearer_the_truth(spread: float) -> None:
    """Over many groups the squared distance to the truth is smaller than the medians'."""
    plain = better = 0.0
    for seed in range(40):
        truth = (10.0 + spread * np.random.default_rng(1000 + seed).standard_normal(8)).tolist()
        samples = group(truth, 0.5, 8, seed)
        plain += float(((medians(samples) - truth) ** 2).sum())
        better += float(((less_noisy_medians(samples) - truth) ** 2).sum())
    assert better < 0.8 * plain


def test_real_differences_stay() -> None:
    truth = [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    samples = group(truth, 0.3, 8, 3)
    assert less_noisy_medians(samples) == pytest.approx(medians(samples), abs=0.02)


def test_passes_that_were_held_up_are_not_taken_for_noise() -> None:
    samples = [[v, v + 0.1, v - 0.1, v + 0.05, v - 0.05, 90.0] for v in (10.0, 12.0, 14.0, 16.0)]
    assert less_noisy_medians(samples) == pytest.approx(medians(samples), abs=0.02)


def test_order_and_units_do_not_matter() -> None:
    samples = group([10.0, 10.2, 10.4, 10.1, 10.3], 0.4, 6, 11)
    found = less_noisy_medians(samples)
    assert less_noisy_medians(samples[::-1]) == pytest.approx(found[::-1])
    scaled = [[1e-6 * v for v in values] for values in samples]
    assert less_noisy_medians(scaled) == pytest.approx(1e-6 * found, rel=1e-9)
    assert found.mean() == pytest.approx(medians(samples).mean())
