"""Measured times: samples, bounds of each action, messages, shared processors, monitoring."""

from timelyfreeze.timing.batches import (
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
    DurationBounds,
    bounds_from_json,
    bounds_from_samples,
    bounds_to_json,
    parse_bounds,
    uniform_bounds,
    validate_bounds,
)
from timelyfreeze.timing.clock_alignment import Intervals, clock_offsets, min_distances
from timelyfreeze.timing.monitoring import (
    FROZEN,
    UNFROZEN,
    BatchRecord,
    Monitoring,
    Pattern,
    PatternTimes,
    Samples,
    discard_errors,
    executed_order,
    halves,
    median_of_each,
    pattern_of,
    slowest_replica,
)
from timelyfreeze.timing.processors import (
    message_time,
    play_actions,
    play_batch,
    receiving,
    shared_cores,
    shared_processors,
    usable_cores,
    with_messages,
)

__all__ = [
    "FROZEN", "UNFROZEN", "BatchRecord", "DurationBounds", "Intervals", "Monitoring", "Pattern",
    "PatternTimes", "RankBatches", "Samples", "batch_times", "bounds_from_json",
    "bounds_from_samples", "bounds_to_json", "clock_offsets", "discard_errors",
    "executed_order", "halves", "holds_for", "interval_factor", "median_of_each", "message_time",
    "min_distances", "misreading", "parse_bounds", "pattern_of", "play_actions", "play_batch",
    "range_of", "rank_batches", "receiving", "shared_cores",
    "shared_processors", "slowest", "slowest_durations", "slowest_replica", "uniform_bounds",
    "usable_cores", "validate_bounds", "with_messages", "within",
]  # fmt: skip
