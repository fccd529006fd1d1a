"""From what ranks measured while monitoring to bounds; batches that were held up are left out."""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import PipelineDag, ScheduleOrder, build_dag, order_to_csv
from timelyfreeze.settings import Phase, key
from timelyfreeze.timing import (
    DEVIATION_OVER_MAD,
    FEWEST_BATCHES,
    UNFROZEN,
    DurationBounds,
    Energies,
    Pattern,
    PatternTimes,
    RankBatches,
    batch_times,
    bounds_from_samples,
    executed_order,
    halves,
    interval_factor,
    message_time,
    simulate_batch,
    slowest,
    slowest_replica,
    with_messages,
)

logger = logging.getLogger(__name__)

# A batch was held up if it took this much longer than its actions do, beside what all batches take
# longer: three times as long, and so many standard deviations of what sets batches apart.
_HELD_UP = math.log(3.0)
_DEVIATIONS = 6.0


@dataclass(frozen=True)
class RankTimes:
    """What one process measured while monitoring."""

    patterns: tuple[PatternTimes, ...]  # times of actions and batches, by what the batches froze
    # what a message from one pipeline rank to another takes, by sender and receiver, milliseconds,
    # as far as this process knows
    p2p_latency_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    # what steps took besides their batches, for each of them; in this process, which may have
    # waited for others
    outside_ms: tuple[float, ...] = ()
    # times of the batches before, which nothing is planned from
    warmup: PatternTimes = field(default_factory=lambda: PatternTimes(UNFROZEN, {}))
    energies: Energies = field(default_factory=Energies)  # of this process's linear weights

    def without(self, name: str, batches: Collection[int]) -> "RankTimes":
        """Return the times without some batches of the warm-up, or of the pattern of that name."""
        if name == Phase.WARMUP.value:
            return replace(self, warmup=self.warmup.without(batches))
        patterns = (p.without(batches) if p.pattern.name == name else p for p in self.patterns)
        return replace(self, patterns=tuple(patterns))


def bounds_from_times(
    ranks: Sequence[RankTimes],
    declared: ScheduleOrder,
    n_processors: float | None = None,
) -> tuple[ScheduleOrder, DurationBounds]:
    """Return the order that ran, and its bounds with all that was measured beside.

    Arguments as for :func:`solve_from_times`.
    """
    order = executed_order([rank.patterns[0].times for rank in ranks if rank.patterns], declared)
    if order != declared:
        logger.warning(
            "The schedule ran in another order than it declares; the plan is for what ran:\n%s",
            order_to_csv(order),
        )
    dag = build_dag(order)
    ranks = _Monitored(dag, ranks, n_processors).without_held_up()
    unfrozen, frozen = zip(*(halves(rank.patterns) for rank in ranks), strict=True)
    bounds = bounds_from_samples(
        dag, unfrozen=slowest_replica(unfrozen), frozen=slowest_replica(frozen)
    )
    if bounds.pinned and bounds.max_ms.any():  # a clock that stands still is told elsewhere
        logger.warning(
            "Freezing makes %d of %d backward actions no faster, as measured (%s ...); they are "
            "left unfrozen. If that surprises you, raise %s",
            len(bounds.pinned),
            int(dag.freezable.sum()),
            ", ".join(str(a) for a in bounds.pinned[:4]),
            key("last_monitor_step"),
        )
    bounds = replace(bounds, p2p_latency_ms=slowest(rank.p2p_latency_ms for rank in ranks))
    monitored = _Monitored(dag, ranks, n_processors)
    bounds = with_messages(dag, bounds, monitored.message_ms(bounds))
    factor = interval_factor([each for batches in monitored.missed_by(bounds) for each in batches])
    if factor is not None:
        factor *= monitored.with_doubled_messages(bounds)
    energies = Energies.total(rank.energies for rank in ranks)
    captured_mean = energies.captured_mean
    return order, replace(
        bounds,
        outside_ms=min(
            (float(np.median(r.outside_ms)) for r in ranks if r.outside_ms), default=0.0
        ),
        interval_factor=factor,
        captured=energies.captured,
        captured_mean=energies.captured if captured_mean is None else captured_mean,
        captured_mean_error=energies.mean_error(len(ranks) / order.n_ranks),
    )


@dataclass(frozen=True)
class _Monitored:
    """The batches of warm-up and monitoring, beside a play of each from bounds."""

    dag: PipelineDag
    ranks: Sequence[RankTimes]
    n_processors: float | None

    @property
    def patterns(self) -> list[Pattern]:
        """The patterns that any rank has seen."""
        return list(dict.fromkeys(each.pattern for rank in self.ranks for each in rank.patterns))

    def message_ms(self, bounds: DurationBounds) -> float:
        """Return the overhead of a message: the median of what the batches of all patterns say.

        It depends on how busy the ranks are. Batches with nothing and with everything frozen are
        the extremes, between which a planned one lies; half frozen ones lie between them too.
        """
        delays_ms = bounds.delays_ms(self.dag)
        overheads_ms = [
            message_time(self.dag, each, float(np.median(batches)), self.n_processors, delays_ms)
            for each, batches in self._patterns(bounds)
            if batches
        ]
        return float(np.median(overheads_ms)) if overheads_ms else 0.0

    def with_doubled_messages(self, bounds: DurationBounds) -> float:
        """Return how many times as long batches are if messages have twice their overhead.

        The overhead was fitted to batches in which ranks wait for each other, and waiting hides
        messages that are late. A plan takes that waiting away: what they cost then, no batch told.
        """
        lead_ms = bounds.lead_ms(self.dag)
        longer = (
            self._play_ms(bounds, each + lead_ms) / self._play_ms(bounds, each)
            for each, batches in self._patterns(bounds)
            if batches and each.any()
        )
        return max(longer, default=1.0)

    def missed_by(self, bounds: DurationBounds) -> list[list[float]]:
        """Return measured over played time of each batch of the warm-up, then of each pattern."""
        warmup = self._batches([rank.warmup for rank in self.ranks], bounds)
        missed_by = []
        for durations_ms, batches_ms in [(bounds.max_ms, warmup), *self._patterns(bounds)]:
            played_ms = self._play_ms(bounds, durations_ms)
            missed_by.append([ms / played_ms if played_ms > 0.0 else 0.0 for ms in batches_ms])
        return missed_by

    def without_held_up(self) -> Sequence[RankTimes]:
        """Return the times without batches in which a rank stood still, of which each is told.

        The batches before monitoring tell too what actions take: of few batches in a half, one that
        was held up may be the median.
        """
        unfrozen, frozen = zip(
            *(halves((*rank.patterns, rank.warmup)) for rank in self.ranks), strict=True
        )
        bounds = bounds_from_samples(self.dag, slowest_replica(unfrozen), slowest_replica(frozen))
        missed_by = self.missed_by(bounds)
        limit = _longest([each for batches in missed_by for each in batches])
        names = [Phase.WARMUP.value, *(pattern.name for pattern in self.patterns)]
        ranks = self.ranks
        for name, batches in zip(names, missed_by, strict=True):
            held_up = {number for number, each in enumerate(batches) if each > limit}
            for number in sorted(held_up):
                logger.warning(
                    "Batch %d of %s took %.1f times as long as its actions: a rank was held up. It "
                    "is left out, and no plan is made from it",
                    number + 1,
                    name,
                    batches[number],
                )
            if held_up:
                ranks = [rank.without(name, held_up) for rank in ranks]
        if list(map(_n_measured, ranks)) == list(map(_n_measured, self.ranks)):
            return ranks
        logger.warning(
            "Nothing else was measured of some actions: those batches are kept after all"
        )
        return self.ranks

    def _play_ms(self, bounds: DurationBounds, durations_ms: NDArray[np.float64]) -> float:
        delays_ms = bounds.delays_ms(self.dag)
        return simulate_batch(self.dag, durations_ms, self.n_processors, delays_ms)[1]

    def _patterns(
        self, bounds: DurationBounds
    ) -> Iterator[tuple[NDArray[np.float64], tuple[float, ...]]]:
        """Yield what actions take by the bounds, and the timed batches, of each pattern; ms."""
        for pattern in self.patterns:
            none = PatternTimes(pattern, {})
            found = [
                next((each for each in rank.patterns if each.pattern == pattern), none)
                for rank in self.ranks
            ]
            is_frozen = [pattern.freezes(action) for action in self.dag.actions]
            durations_ms = np.where(is_frozen, bounds.min_ms, bounds.max_ms)
            yield durations_ms, self._batches(found, bounds)

    def _batches(self, ranks: Sequence[PatternTimes], bounds: DurationBounds) -> tuple[float, ...]:
        """Return the time of each batch from each rank's action times and spans."""
        batches = [
            RankBatches(
                tuple((Phase.STABLE.value, span_ms) for span_ms in rank.spans_ms),
                {action: float(np.median(values)) for action, values in rank.times.items()},
            )
            for rank in ranks
        ]
        return batch_times(self.dag, batches, bounds.delays_ms(self.dag)).get(Phase.STABLE, ())


def _n_measured(rank: RankTimes) -> list[int]:
    """Return of how many actions there are times with nothing frozen, and with all frozen."""
    return [sum(bool(times) for times in half.values()) for half in halves(rank.patterns)]


def _longest(missed_by: Sequence[float]) -> float:
    """Return the largest of measured over played times that a batch has which was not held up."""
    logs = np.log([each for each in missed_by if each > 0.0])
    if len(logs) < FEWEST_BATCHES:
        return math.inf
    median = float(np.median(logs))
    deviation = DEVIATION_OVER_MAD * float(np.median(np.abs(logs - median)))
    return math.exp(median + max(_HELD_UP, _DEVIATIONS * deviation))
