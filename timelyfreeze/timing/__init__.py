"""Measured times: samples, bounds of actions, messages, shared processors, monitoring."""

from timelyfreeze.timing.batches import (
    FEWEST_BATCHES,
    RankBatches,
    batch_times,
    holds_for,
    interval_factor,
    misreading,
    range_of,
    rank_batches,
    slowest,
    slowest_durations,
    within,
)
from timelyfreeze.timing.bounds import (
    DEVIATION_OVER_MAD,
    DurationBounds,
    bounds_from_json,
    bounds_from_samples,
    bounds_to_json,
    parse_bounds,
    uniform_bounds,
    validate_bounds,
)
from timelyfreeze.timing.clock_alignment import Intervals, clock_offsets, min_distances
from timelyfreeze.timing.energies import Energies
from timelyfreeze.timing.monitoring import (
    UNFROZEN,
    BatchRecord,
    Monitoring,
    Pattern,
    PatternTimes,
    Samples,
    executed_order,
    halves,
    median_of_each,
    pattern_of,
    slowest_replica,
)
from timelyfreeze.timing.processors import (
    message_time,
    play_actions,
    shared_cores,
    shared_processors,
    simulate_batch,
    usable_cores,
    with_messages,
)
