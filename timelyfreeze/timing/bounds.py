"""Duration bounds: times of actions with nothing frozen and with everything frozen.

The bounds are w_i^max and w_i^min of arXiv:2602.05754, Eq. 3, measured in the two halves of the
monitoring phase (Sec. 3.1). Notation: A actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.files import (
    MOST,
    Milliseconds,
    Within,
    json_lines,
    parse_json,
    read_dataclass,
    shown,
    to_plain,
)
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    check_delays,
    check_durations,
    edge_delays,
)
from timelyfreeze.settings import key

# Standard deviation over median absolute deviation, and variance of a median over that of a mean,
# of normal noise.
DEVIATION_OVER_MAD = 1.4826
_MEDIAN_OVER_MEAN = math.pi / 2.0
# With fewer medians around a mean, nothing is gained by moving them.
_MIN_MEDIANS = 4


@dataclass(frozen=True, eq=False)
class DurationBounds:
    """Shortest and longest duration of all actions of a DAG, in the order of its actions.

    Attributes:
        min_ms: Everything frozen, float64, shape [A], milliseconds.
        max_ms: Nothing frozen, float64, shape [A], milliseconds; equal to ``min_ms`` where freezing
            changes nothing.
        pinned: Freezable actions measured no faster frozen than unfrozen, with bounds made equal.
            The maker of the bounds should report them.
        p2p_overhead_ms: Overhead of a message within a receiving action; part of both its bounds.
        p2p_latency_ms: Latency of a message, by sender and receiver; 0 if missing.
        outside_ms: Time of a step beside its batches, per batch; 0 if unknown.
        interval_factor: 9 of 10 batches take 1 / factor to factor times the predicted time
            (``interval``); None for too few timed batches.
        captured: Fraction of the gradients' energy kept by frozen weights; 0 for no gradient.
        captured_mean: The fraction of the mean gradient's energy.
        captured_mean_error: Its standard error; None if not measured.
    """

    min_ms: NDArray[np.float64]
    max_ms: NDArray[np.float64]
    pinned: tuple[Action, ...] = ()
    p2p_overhead_ms: float = 0.0
    p2p_latency_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    outside_ms: float = 0.0
    interval_factor: float | None = None
    captured: float = 0.0
    captured_mean: float = 0.0
    captured_mean_error: float | None = None

    def __post_init__(self) -> None:
        """Keep both arrays from being written to."""
        self.min_ms.setflags(write=False)
        self.max_ms.setflags(write=False)

    def delays_ms(self, dag: PipelineDag) -> NDArray[np.float64]:
        """Return how long after its first action an edge's second may start, shape [E]."""
        return edge_delays(dag, self.p2p_latency_ms)

    def lead_ms(self, dag: PipelineDag) -> NDArray[np.float64]:
        """Return the message overhead within each action, shape [A]."""
        return np.float64(self.p2p_overhead_ms) * dag.receiving


def validate_bounds(dag: PipelineDag, bounds: DurationBounds) -> None:
    """Check that ``bounds`` fits ``dag``.

    Raises:
        ValueError: If a shape is not [A]; a bound is negative or not finite; ``min_ms`` exceeds
            ``max_ms``; or both differ for an action not shortened by freezing.
    """
    low = check_durations(dag, bounds.min_ms, "min_ms")
    high = check_durations(dag, bounds.max_ms, "max_ms")
    check_delays(dag, bounds.delays_ms(dag))
    for i in np.flatnonzero((low > high) | (~dag.freezable & (low != high))):
        if low[i] > high[i]:
            rule = "it may not take longer frozen than unfrozen"
        else:
            rule = "it computes no weight gradient, so both must be equal"
        raise ValueError(
            f"action {dag.actions[i]}: {low[i]} ms frozen, {high[i]} ms unfrozen; {rule}; "
            f"measure again with a later {key('last_monitor_step')}"
        )


def bounds_from_samples(
    dag: PipelineDag,
    unfrozen: Mapping[Action, Sequence[float]],
    frozen: Mapping[Action, Sequence[float]],
) -> DurationBounds:
    """Turn durations seen in monitoring into bounds, by the median over batches.

    The median, because a delayed batch (first allocation, garbage collection, another process) is
    an outlier upwards and would pull a mean. Medians of a stage and kind then lose noise
    (``less_noisy_medians``). Actions not shortened by freezing did the same work in both halves, so
    their samples are pooled and both bounds equal.

    A freezable action not faster frozen than unfrozen is pinned to its unfrozen median and listed
    in ``pinned``; swapping both medians instead would promise mere noise.

    Args:
        dag: Precedence graph of A actions.
        unfrozen: Durations of actions with nothing frozen, milliseconds.
        frozen: Durations of actions with everything frozen, milliseconds.

    Raises:
        ValueError: If an action of the DAG has no sample in one of the halves, a sampled action is
            not in the DAG, or a sample is negative or not finite.
    """
    for half, samples in (("unfrozen", unfrozen), ("frozen", frozen)):
        _check_samples(dag, half, samples)
    groups: dict[tuple[int, ActionKind], list[Action]] = {}
    for action in dag.actions:
        groups.setdefault((action.stage, action.kind), []).append(action)
    fast, slow = np.empty(len(dag.actions)), np.empty(len(dag.actions))
    for (_, kind), alike in groups.items():
        places = [dag.index[action] for action in alike]
        if kind.freezable:
            slow[places] = less_noisy_medians([unfrozen[action] for action in alike])
            fast[places] = less_noisy_medians([frozen[action] for action in alike])
        else:
            pooled = [[*unfrozen[action], *frozen[action]] for action in alike]
            fast[places] = slow[places] = less_noisy_medians(pooled)
    pinned = np.flatnonzero(dag.freezable & (fast >= slow))
    fast[pinned] = slow[pinned]
    return DurationBounds(fast, slow, tuple(dag.actions[i] for i in pinned))


def uniform_bounds(
    dag: PipelineDag,
    *,
    forward_ms: float,
    backward_ms: tuple[float, float] | None = None,
    input_ms: float | None = None,
    weight_ms: tuple[float, float] | None = None,
) -> DurationBounds:
    """Give every action of a kind the same bounds; for examples, tests and what-if questions.

    Args:
        dag: Precedence graph of A actions.
        forward_ms: Duration of F, milliseconds.
        backward_ms: (all frozen, nothing frozen) of B, milliseconds.
        input_ms: Duration of I, milliseconds.
        weight_ms: (all frozen, nothing frozen) of W, milliseconds.

    Raises:
        ValueError: If the DAG has a kind without a duration, or ``validate_bounds`` refuses the
            result.
    """
    by_kind: dict[ActionKind, tuple[float, float] | None] = {
        ActionKind.FORWARD: (forward_ms, forward_ms),
        ActionKind.FULL_BACKWARD: backward_ms,
        ActionKind.INPUT_BACKWARD: None if input_ms is None else (input_ms, input_ms),
        ActionKind.WEIGHT_BACKWARD: weight_ms,
    }
    given = {kind: pair for kind, pair in by_kind.items() if pair is not None}
    for action in dag.actions:
        if action.kind not in given:
            raise ValueError(f"action {action} exists but no duration is given for {action.kind}")
    pairs = np.array([given[action.kind] for action in dag.actions], dtype=np.float64)
    bounds = DurationBounds(*pairs.T.copy())
    validate_bounds(dag, bounds)
    return bounds


def _check_samples(dag: PipelineDag, half: str, samples: Mapping[Action, Sequence[float]]) -> None:
    for action in samples:
        if action not in dag.index:
            raise ValueError(f"action {action} has {half} samples but is not in the schedule")
    for action in dag.actions:
        values = samples.get(action, ())
        if len(values) == 0:
            raise ValueError(
                f"action {action} has no {half} sample; each action must run at least once in "
                f"each half of the monitoring phase; choose a later {key('last_monitor_step')}"
            )
        for value in values:
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(
                    f"action {action} has a {half} sample of {value} ms; a duration must be finite "
                    "and not negative; if the clock misread once, choose a later "
                    f"{key('last_monitor_step')}"
                )


def less_noisy_medians(samples: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the medians of a group of alike actions, with less noise.

    Medians of a few batches carry noise, and a solver for the shortest batch uses noise as readily
    as real differences: frozen backwards only happened to look long, and the batch comes out longer
    than planned. The microbatches of a stage do alike work, so differences of medians within noise
    are noise. Medians move towards the mean of their group as far as noise explains (the estimator
    of James and Stein, positive part). Where microbatches really differ, medians stay where they
    are. The noise of a group comes from distances of samples to their action's median. Plain
    medians are returned for fewer than 4 actions, for single samples, of unknown noise, and for
    samples without noise.
    """
    medians = np.array([float(np.median(values)) for values in samples], dtype=np.float64)
    counts = np.array([len(values) for values in samples], dtype=np.float64)
    if len(medians) < _MIN_MEDIANS or counts.min() < 2:
        return medians
    distances = np.concatenate(
        [
            np.abs(np.asarray(values, dtype=np.float64) - median) * math.sqrt(n / (n - 1.0))
            for values, median, n in zip(samples, medians, counts.tolist(), strict=True)
        ]
    )
    deviation = DEVIATION_OVER_MAD * float(np.median(distances))
    noise = deviation**2 * _MEDIAN_OVER_MEAN / float(counts.mean())
    mean = float(medians.mean())
    spread = float(((medians - mean) ** 2).sum())
    if spread == 0.0:
        return medians
    kept = max(0.0, 1.0 - (len(medians) - 3) * noise / spread)
    return medians if kept == 1.0 else mean + kept * (medians - mean)


class _Link(NamedTuple):
    """Sending and receiving rank of messages."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.sender}>{self.receiver}"

    @staticmethod
    def parse(text: str) -> _Link:
        ranks = text.split(">")
        if len(ranks) != 2 or not all(rank.isdecimal() and len(rank) < 10 for rank in ranks):
            raise ValueError(f'{shown(text)} is no link; it must name two ranks, like "0>1"')
        return _Link(*map(int, ranks))


class _Pair(NamedTuple):
    """Shortest and longest duration of an action."""

    min_ms: Milliseconds
    max_ms: Milliseconds


@dataclass(frozen=True)
class BoundsTable:
    """Bounds of a file, possibly of another schedule; as in ``DurationBounds``."""

    bounds: Mapping[Action, _Pair]
    pinned: tuple[Action, ...] = ()
    p2p_overhead_ms: Milliseconds = 0.0
    p2p_latency_ms: Mapping[_Link, Milliseconds] = field(default_factory=dict)
    outside_ms: Milliseconds = 0.0
    interval_factor: Annotated[float, Within(1.0, MOST)] | None = None
    captured: Annotated[float, Within(0.0, MOST)] = 0.0
    captured_mean: Annotated[float, Within(0.0, MOST)] = 0.0
    captured_mean_error: Annotated[float, Within(0.0, MOST)] | None = None


def bounds_to_json(
    dag: PipelineDag, bounds: DurationBounds, more: Mapping[str, Any] | None = None
) -> str:
    """Write bounds as JSON, a line per action; undone exactly by ``bounds_from_json``.

    ``more`` is plain data of other entries.
    """
    validate_bounds(dag, bounds)
    rows = zip(bounds.min_ms.tolist(), bounds.max_ms.tolist(), strict=True)
    table = BoundsTable(
        bounds=dict(zip(dag.actions, starmap(_Pair, rows), strict=True)),
        p2p_latency_ms={_Link(*link): ms for link, ms in bounds.p2p_latency_ms.items()},
        **{name: getattr(bounds, name) for name in _KEPT},
    )
    return json_lines({**to_plain(table), **(more or {})}, depth=2) + "\n"


# What a file has of bounds besides their durations and links.
_KEPT = (
    "pinned", "p2p_overhead_ms", "outside_ms", "interval_factor", "captured", "captured_mean",
    "captured_mean_error",
)  # fmt: skip


def parse_bounds(data: Any) -> BoundsTable:
    """Read the JSON of ``bounds_to_json``; all but ``bounds`` may be missing."""
    table = read_dataclass(BoundsTable, data, partly=True)
    if strange := [action for action in table.pinned if action not in table.bounds]:
        raise ValueError(f"pinned has {strange[0]}, which is not among the bounds")
    return table


def bounds_from_json(dag: PipelineDag, text: str) -> DurationBounds:
    """Read bounds of ``bounds_to_json``, in any order, and check them against ``dag``."""
    try:
        table = parse_bounds(parse_json(text))
    except ValueError as error:
        raise ValueError(f"not the text of duration bounds: {error}") from error
    odd = sorted(map(str, set(table.bounds) ^ set(dag.actions)))
    if odd:
        raise ValueError(
            f"the bounds and the schedule do not have the same actions: {odd[0]} is in only one "
            f"of them ({len(odd)} such actions); measure the bounds with this schedule"
        )
    pairs = np.array([table.bounds[action] for action in dag.actions], dtype=np.float64)
    kept = {name: getattr(table, name) for name in ("p2p_latency_ms", *_KEPT)}
    bounds = DurationBounds(*pairs.T.copy(), **kept)
    validate_bounds(dag, bounds)
    return bounds
