"""Runs on a simulated machine that changes its speed: is the later median in the interval?"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import simulate
from timelyfreeze.planning.measured import RankTimes, bounds_from_times
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, one_f_one_b_order
from timelyfreeze.timing.monitoring import FROZEN, UNFROZEN, Pattern, PatternTimes

ORDER = one_f_one_b_order(2, 4)
DAG = build_dag(ORDER)
# Of the logarithm, so that 0.85 and 1.2 are its 10th and 90th percentile, as measured
# (docs/results.md, drift).
DRIFT = math.log(1.2 / 0.85) / (2 * 1.2816)
N_RUNS = 30


class Machine:
    """Takes 10 ms for a forward and 20 for a live backward, times its speed and some noise."""

    def __init__(self, seed: int, drift: float, noise: float, lasts: float = 2.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.drift, self.noise, self.lasts = drift, noise, lasts
        self.slowness = self._speeds()

    def _speeds(self) -> Iterator[float]:
        """A speed for each batch; one lasts for so many of them in the mean."""
        while True:
            speed = math.exp(self.rng.normal(0.0, self.drift))
            yield from [speed] * int(self.rng.geometric(1.0 / self.lasts))

    def batch(self, ratio: float) -> tuple[dict[Action, float], list[float], float]:
        """Return what actions took, each rank's span, and the batch, on the machine's own clock."""
        slowness = next(self.slowness)
        durations = {
            action: (20.0 - 10.0 * ratio if action.kind.freezable else 10.0)
            * slowness
            * math.exp(self.rng.normal(0.0, self.noise))
            for row in ORDER.ranks
            for action in row
        }
        seen = simulate(ORDER, durations.__getitem__)
        spans = [seen[row[-1]][1] - seen[row[0]][0] for row in ORDER.ranks]
        return durations, spans, max(end for _, end in seen.values())


def timed(machine: Machine, pattern: Pattern, n: int) -> list[PatternTimes]:
    """What each rank sees of ``n`` batches."""
    batches = [machine.batch(float(pattern == FROZEN)) for _ in range(n)]
    return [
        PatternTimes(
            pattern,
            {action: [each[0][action] for each in batches] for action in row if n},
            tuple(each[1][rank] for each in batches),
        )
        for rank, row in enumerate(ORDER.ranks)
    ]


def monitored(machine: Machine, n: int, n_warmup: int) -> list[RankTimes]:
    warmup, *halves = (
        timed(machine, pattern, n_batches)
        for pattern, n_batches in ((UNFROZEN, n_warmup), (UNFROZEN, n), (FROZEN, n))
    )
    return [
        RankTimes(patterns, warmup=warmup[rank])
        for rank, patterns in enumerate(zip(*halves, strict=True))
    ]


@cache
def in_interval(
    seed: int, n: int, drift: float, noise: float, lasts: float = 2.0, n_warmup: int = 0
) -> tuple[bool, float]:
    """Whether the later median of half frozen batches is in the interval, and its factor."""
    machine = Machine(seed, drift, noise, lasts)
    _, bounds = bounds_from_times(monitored(machine, n, n_warmup), ORDER)
    assert bounds.interval_factor is not None
    span = bounds.max_ms - bounds.min_ms
    plan = plan_from_ratios(DAG, bounds, np.where(DAG.freezable & (span > 0.0), 0.5, 0.0))
    median = float(np.median([machine.batch(0.5)[2] for _ in range(30)]))
    factor = bounds.interval_factor
    return 1.0 / factor <= median / plan.batch_ms <= factor, factor


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 19])
def test_nine_of_ten_later_medians_lie_in_the_interval(n: int) -> None:
    """Of short runs, with 4 batches of each half, and of longer ones, with 19."""
    found = [in_interval(seed, n, DRIFT, 0.03) for seed in range(N_RUNS)]
    assert sum(hit for hit, _ in found) >= 0.9 * N_RUNS


@pytest.mark.slow
def test_an_even_machine_has_a_narrow_interval_and_keeps_to_it() -> None:
    found = [in_interval(seed, 19, 0.0, 0.01) for seed in range(N_RUNS // 2)]
    uneven = [in_interval(seed, 19, DRIFT, 0.03)[1] for seed in range(N_RUNS // 2)]
    assert sum(hit for hit, _ in found) >= 0.9 * len(found)
    assert max(factor for _, factor in found) < min(uneven)
    assert np.median([factor for _, factor in found]) < 1.02 < 1.15 < np.median(uneven)


def hits(lasts: float, n: int, n_warmup: int) -> tuple[int, float]:
    found = [in_interval(seed, n, DRIFT, 0.03, lasts, n_warmup) for seed in range(N_RUNS)]
    return sum(hit for hit, _ in found), float(np.median([factor for _, factor in found]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lasts", "n", "n_warmup", "least"), [(4.0, 4, 16, 0.9), (20.0, 19, 60, 0.75)]
)
def test_the_warm_up_tells_of_speeds_that_last_for_much_of_monitoring(
    lasts: float, n: int, n_warmup: int, least: float
) -> None:
    """As long as the warm-up of the default run, and that of the paper, which sees five speeds."""
    alone, narrow = hits(lasts, n, 0)
    with_warmup, wide = hits(lasts, n, n_warmup)
    assert with_warmup >= max(least * N_RUNS, alone + 1)
    assert wide > narrow
