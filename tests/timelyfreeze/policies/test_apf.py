import math

import numpy as np
import pytest

from tests.timelyfreeze.helpers.toy_model import assert_resumes, only_error, run, toy_layout
from timelyfreeze.policies.apf import Apf
from timelyfreeze.policies.policy import Metric, Source

LAYOUT = toy_layout(2)
N = len(LAYOUT.names)


class Elements:
    """Eq. 2 as it is printed, for every element of every tensor."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.mean = [np.zeros(size) for size in LAYOUT.sizes]
        self.mean_abs = [np.zeros(size) for size in LAYOUT.sizes]

    def update(self, deltas: list[np.ndarray]) -> dict[Metric, np.ndarray]:
        """Take one check's updates; return what a meter would tell the policy."""
        a = self.alpha
        self.mean = [a * e + (1 - a) * d for e, d in zip(self.mean, deltas, strict=True)]
        self.mean_abs = [
            a * e + (1 - a) * abs(d) for e, d in zip(self.mean_abs, deltas, strict=True)
        ]
        return {
            Metric.ABS_SUM: np.array([abs(d).sum() for d in deltas]),
            Metric.MEAN_ABS_SUM: np.array([abs(e).sum() for e in self.mean]),
        }

    def scores(self) -> np.ndarray:
        """Weighted means over the elements of each tensor, element by element."""
        scores = []
        for mean, mean_abs in zip(self.mean, self.mean_abs, strict=True):
            moved = mean_abs > 0
            each = abs(mean[moved]) / mean_abs[moved]
            weights = mean_abs[moved]
            scores.append(float((weights * each).sum() / weights.sum()) if moved.any() else 0.0)
        return np.array(scores)


def test_sums_cancel_within_a_tensor_before_they_are_scored() -> None:
    # |E(sum)| / E(sum of |.|) by hand, alpha 1/2: tensor 0 gets +6 of 6, then -2 of 2: E 3 then
    # 0.5, abs 3 then 2.5: score 1, then 0.2. Tensor 1 moves 4 in all, but nowhere: score 0.
    rest = [1.0] * (N - 2)
    checks = [
        {Metric.SUM: np.array([6.0, 0.0, *rest]), Metric.ABS_SUM: np.array([6.0, 4.0, *rest])},
        {Metric.SUM: np.array([-2.0, 0.0, *rest]), Metric.ABS_SUM: np.array([2.0, 4.0, *rest])},
    ]
    for threshold, expected in [(0.19, [1]), (0.21, [0, 1])]:
        policy = Apf(alpha=0.5, threshold=threshold, reduction="sums")
        decisions = run(policy, LAYOUT, checks)
        assert np.flatnonzero(decisions[1].frozen).tolist() == [1]
        assert np.flatnonzero(decisions[2].frozen).tolist() == expected
    assert_resumes(policy, LAYOUT, checks)
    assert policy.measurement.metrics == (Metric.ABS_SUM, Metric.SUM)


def metrics(abs_sums: list[float], mean_abs_sums: list[float]) -> dict[Metric, np.ndarray]:
    return {
        Metric.ABS_SUM: np.array(abs_sums),
        Metric.MEAN_ABS_SUM: np.array(mean_abs_sums),
    }


def test_what_drifts_stays_live_and_what_swings_or_stands_is_frozen() -> None:
    # Tensor 0 drifts, 1 swings, 2 stands still; the others drift.
    elements = Elements(alpha=0.9)
    checks = []
    for k in range(1, 41):
        deltas = [np.full(size, 0.3) for size in LAYOUT.sizes]
        deltas[1] *= (-1) ** k
        deltas[2] *= 0
        checks.append(elements.update(deltas))
    decisions = run(Apf(alpha=0.9, threshold=0.1), LAYOUT, checks)
    assert not decisions[0].frozen.any()
    assert np.flatnonzero(decisions[1].frozen).tolist() == [2], "the first score of a move is 1"
    assert np.flatnonzero(decisions[-1].frozen).tolist() == [1, 2]
    assert decisions[-1].metrics == {
        "frozen_tensors": 2,
        "smallest_score": 0.0,
        "median_score": pytest.approx(1.0),
    }
    # |E| of a swing tends to (1 - alpha) / (1 + alpha) of its height: 1/19.
    assert elements.scores()[1] == pytest.approx(1 / 19, rel=0.02)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.99])
def test_every_score_is_the_weighted_mean_of_eq_2(alpha: float) -> None:
    rng = np.random.default_rng(3)
    elements = Elements(alpha)
    drift = rng.normal(size=N)
    checks = []
    for _ in range(12):
        # Heights that differ by orders of magnitude within a tensor, so that weights matter.
        deltas = [
            (rng.normal(size=size) + d) * 10.0 ** rng.uniform(-3, 0, size)
            for size, d in zip(LAYOUT.sizes, drift, strict=True)
        ]
        checks.append(elements.update(deltas))
    scores = elements.scores()
    for threshold in np.sort(scores)[:-1] * (1 + 1e-9):  # just above each score in turn
        decisions = run(Apf(alpha=alpha, threshold=min(threshold, 1.0)), LAYOUT, checks)
        assert decisions[-1].frozen.tolist() == (scores < threshold).tolist()
    assert decisions[-1].metrics["median_score"] == pytest.approx(np.median(scores))


def test_updates_without_direction_score_as_the_docstring_says() -> None:
    # The first tensor is a large one of independent normal updates; the others stand still.
    rng = np.random.default_rng(0)
    alpha, zeros = 0.9, [0.0] * (N - 1)
    mean = np.zeros(20000)
    checks = []
    for _ in range(60):
        delta = rng.normal(size=mean.size)
        mean = alpha * mean + (1 - alpha) * delta
        checks.append(metrics([abs(delta).sum(), *zeros], [abs(mean).sum(), *zeros]))
    noise = math.sqrt((1 - alpha) / (1 + alpha))
    for threshold, frozen in [(0.97 * noise, False), (1.03 * noise, True)]:
        decisions = run(Apf(alpha=alpha, threshold=threshold), LAYOUT, checks)
        assert decisions[-1].frozen[0] == frozen


def test_as_many_elements_are_frozen_in_the_mean_as_are_settled_one_by_one() -> None:
    shares = np.array([0.0, 1.0, 0.29, *np.linspace(0.1, 0.9, N - 3)])
    settled = {Metric.SETTLED: np.round(shares * LAYOUT.sizes)}
    shares = settled[Metric.SETTLED] / LAYOUT.sizes
    n_checks = 3000
    decisions = run(Apf(reduction="share"), LAYOUT, [settled] * n_checks)[1:]
    hits = sum(decision.frozen.astype(int) for decision in decisions)
    spread = np.sqrt(n_checks * shares * (1.0 - shares))
    assert (np.abs(hits - n_checks * shares) <= 5.3 * spread).all()
    whole = settled[Metric.SETTLED].sum() / LAYOUT.sizes.sum()
    assert decisions[0].metrics["settled_share"] == pytest.approx(whole)
    assert_resumes(Apf(reduction="share"), LAYOUT, [settled] * 9)


def test_single_elements_are_judged_by_alpha_and_threshold() -> None:
    measurement = Apf(alpha=0.7, threshold=0.01, reduction="share").measurement
    assert measurement.metrics == (Metric.SETTLED,)
    assert (measurement.decay, measurement.threshold) == (0.7, 0.01)


def test_a_frozen_tensor_stays_frozen_until_something_moves_it() -> None:
    policy = Apf(alpha=0.5, threshold=0.4)
    ones = [1.0] * (N - 1)
    checks = [
        metrics([1.0, *ones], [0.5, *ones]),  # E_abs 0.5, score 1
        metrics([1.0, *ones], [0.25, *ones]),  # E_abs 0.75, score 1/3: frozen
        metrics([0.0, *ones], [0.125, *ones]),  # no update: both halve
        metrics([0.0, *ones], [0.0625, *ones]),
        metrics([1.0, *ones], [0.5, *ones]),  # moved: E_abs 0.59375, score 0.84
    ]
    decisions = run(policy, LAYOUT, checks)
    assert [bool(d.frozen[0]) for d in decisions] == [False, False, True, True, True, False]


def test_a_score_at_the_threshold_is_not_below_it() -> None:
    half = metrics([2.0] * N, [1.0] * N)
    found = [run(Apf(alpha=0.0, threshold=t), LAYOUT, [half])[-1] for t in (0.5, 0.5001)]
    assert [bool(d.frozen.any()) for d in found] == [False, True]


def stability(pattern: str) -> list[dict[Metric, np.ndarray]]:
    """Checks at which the first tensor is stable (s) or not (u); the others never are.

    With alpha 0 the score is that of the last interval alone.
    """
    ones = [1.0] * (N - 1)
    return [metrics([1.0, *ones], [0.0 if c == "s" else 1.0, *ones]) for c in pattern]


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        # Stable at 1: frozen for one check. Live from 2, judged at 3: frozen for two. And so on.
        ("ssssssssss", "1011011101"),
        # Not judged while frozen (2), nor when it has just been let go.
        ("suusssssss", "1001011011"),
        # Periods 1, 2, 3 until the check at 10; unstable there, so 3 // 2 = 1: frozen for one check
        # all the same. Live from 11, judged at 12: stable, so 2 again.
        ("sssssssssusss", "1011011101011"),
        # Unstable with period 1: 1 // 2 = 0, live at once.
        ("suuuss", "100010"),
        ("uuuu", "0000"),
    ],
)
def test_periods_grow_by_one_and_are_halved(pattern: str, frozen: str) -> None:
    policy = Apf(alpha=0.0, threshold=0.5, freezing_period="grow_and_halve")
    decisions = run(policy, LAYOUT, stability(pattern))
    assert "".join(str(int(d.frozen[0])) for d in decisions[1:]) == frozen
    assert not any(d.frozen[1:].any() for d in decisions)


def test_a_tensor_whose_numbers_are_not_finite_is_live() -> None:
    checks = [metrics([math.nan, *[0.0] * (N - 1)], [math.nan, *[0.0] * (N - 1)])]
    assert run(Apf(), LAYOUT, checks)[-1].frozen.tolist() == [False] + [True] * (N - 1)


@pytest.mark.parametrize("period", ["until_unstable", "grow_and_halve"])
def test_a_resumed_run_decides_the_same(period: str) -> None:
    rng = np.random.default_rng(1)
    checks = [metrics(rng.random(N).tolist(), (rng.random(N) / 3).tolist()) for _ in range(12)]
    policy = Apf(alpha=0.5, threshold=0.3, freezing_period=period)
    assert_resumes(policy, LAYOUT, checks)
    assert len({d.frozen.tobytes() for d in run(policy, LAYOUT, checks)}) > 3


def test_it_measures_updates_with_its_alpha() -> None:
    measurement = Apf(alpha=0.7).measurement
    assert measurement.source is Source.UPDATES
    assert set(measurement.metrics) == {Metric.ABS_SUM, Metric.MEAN_ABS_SUM}
    assert measurement.decay == 0.7


def test_elements_that_stay_settled_have_no_periods() -> None:
    assert only_error(Apf(reduction="share", freezing_period="grow_and_halve")) == (
        "apf.freezing_period is 'grow_and_halve', and apf.reduction is 'share', whose elements "
        "stay settled; set it to 'until_unstable'"
    )
