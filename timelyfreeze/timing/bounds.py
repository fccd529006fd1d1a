"""Duration bounds: how long each action takes with nothing frozen and with everything frozen.

They are w_i^max and w_i^min of arXiv:2602.05754, Eq. 3, measured in the two halves of the
monitoring phase (Sec. 3.1). Notation: A actions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.files import field_of, number_of, parse_json, shown
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    check_delays,
    check_durations,
    edge_delays,
    parse_action,
)
from timelyfreeze.settings import key
from timelyfreeze.timing.shrinkage import less_noisy_medians


@dataclass(frozen=True, eq=False)
class DurationBounds:
    """Shortest and longest duration of every action of a DAG, in the order of its actions.

    Attributes:
        min_ms: Everything frozen, float64, shape [A], milliseconds.
        max_ms: Nothing frozen, float64, shape [A], milliseconds; equal to ``min_ms`` where freezing
            changes nothing.
        pinned: Freezable actions that were measured no faster frozen than unfrozen, and whose
            bounds were therefore made equal. Whoever made the bounds should report them.
        message_ms: How much of an action that works on what another rank has sent is the overhead of
            that message; part of both bounds of such an action.
        transfers_ms: What a message from one rank to another takes, by sender and receiver;
            0 where it is missing.
    """

    min_ms: NDArray[np.float64]
    max_ms: NDArray[np.float64]
    pinned: tuple[Action, ...] = ()
    message_ms: float = 0.0
    transfers_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def delays_ms(self, dag: PipelineDag) -> NDArray[np.float64]:
        """Return how long after its first action an edge's second may start, shape [E]."""
        return edge_delays(dag, self.transfers_ms)


def validate_bounds(dag: PipelineDag, bounds: DurationBounds) -> None:
    """Check that ``bounds`` fits ``dag``.

    Args:
        dag: Precedence graph of A actions.
        bounds: The bounds to check.

    Raises:
        ValueError: If a shape is not [A]; a bound is negative or not finite; ``min_ms`` exceeds
            ``max_ms``; or the two differ for an action that freezing cannot shorten.
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
            f"measure again with a later {key('monitor')}"
        )


def bounds_from_samples(
    dag: PipelineDag,
    unfrozen: Mapping[Action, Sequence[float]],
    frozen: Mapping[Action, Sequence[float]],
) -> DurationBounds:
    """Turn the durations seen while monitoring into bounds, by the median over batches.

    The median, because a pass that was held up (first allocation, garbage collection, another
    process) is an outlier upwards and would pull a mean. Medians of a stage and kind then lose what
    is noise among them (:mod:`timelyfreeze.timing.shrinkage`). Actions that freezing cannot shorten did
    the same work in both halves, so their samples are pooled and both bounds equal.

    A freezable action that was not faster frozen than unfrozen cannot be sped up as far as the
    measurement can tell. It is pinned to its unfrozen median and listed in ``pinned``; swapping
    the two medians instead would promise time that is only noise.

    Args:
        dag: Precedence graph of A actions.
        unfrozen: Durations of each action while nothing was frozen, milliseconds.
        frozen: Durations of each action while everything was frozen, milliseconds.

    Returns:
        DurationBounds: Medians in the order of ``dag.actions``.

    Raises:
        ValueError: If an action of the DAG has no sample in one of the halves, a sampled action is
            not in the DAG, or a sample is negative or not finite.
    """
    for half, samples in (("unfrozen", unfrozen), ("frozen", frozen)):
        _check_samples(dag, half, samples)
    groups: dict[tuple[int, ActionKind], list[Action]] = {}
    for action in dag.actions:
        groups.setdefault((action.stage, action.kind), []).append(action)
    slow: dict[Action, float] = {}
    fast: dict[Action, float] = {}
    for (_, kind), alike in groups.items():
        if kind.freezable:
            slow |= _medians(alike, [unfrozen[action] for action in alike])
            fast |= _medians(alike, [frozen[action] for action in alike])
        else:
            slow |= _medians(alike, [[*unfrozen[action], *frozen[action]] for action in alike])
    pinned = tuple(a for a in dag.actions if a.kind.freezable and fast[a] >= slow[a])
    fast |= {action: slow[action] for action in pinned}
    low = [fast.get(action, slow[action]) for action in dag.actions]
    return _bounds(low, [slow[action] for action in dag.actions], pinned)


def _medians(actions: Sequence[Action], samples: Sequence[Sequence[float]]) -> dict[Action, float]:
    return dict(zip(actions, less_noisy_medians(samples).tolist(), strict=True))


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

    Returns:
        DurationBounds: Bounds in the order of ``dag.actions``.

    Raises:
        ValueError: If the DAG has a kind for which no duration is given, or ``validate_bounds``
            refuses the result.
    """
    by_kind: dict[ActionKind, tuple[float, float] | None] = {
        ActionKind.FORWARD: (forward_ms, forward_ms),
        ActionKind.FULL_BACKWARD: backward_ms,
        ActionKind.INPUT_BACKWARD: None if input_ms is None else (input_ms, input_ms),
        ActionKind.WEIGHT_BACKWARD: weight_ms,
    }
    pairs: list[tuple[float, float]] = []
    for action in dag.actions:
        pair = by_kind[action.kind]
        if pair is None:
            raise ValueError(f"action {action} exists but no duration is given for {action.kind}")
        pairs.append(pair)
    bounds = _bounds([low for low, _ in pairs], [high for _, high in pairs])
    validate_bounds(dag, bounds)
    return bounds


def bounds_to_json(dag: PipelineDag, bounds: DurationBounds) -> str:
    """Write bounds as JSON, one line per action; undone exactly by ``bounds_from_json``.

    Args:
        dag: Precedence graph of A actions.
        bounds: Bounds that fit ``dag``.

    Returns:
        str: An object with ``bounds`` (action to ``min_ms`` and ``max_ms``), ``pinned``,
        ``message_ms`` and ``transfers_ms`` (by link: "0>1" from rank 0 to rank 1).

    Raises:
        ValueError: As ``validate_bounds``.
    """
    validate_bounds(dag, bounds)
    rows = zip(dag.actions, bounds.min_ms.tolist(), bounds.max_ms.tolist(), strict=True)
    table = ",\n".join(
        f'    "{action}": {{"min_ms": {json.dumps(low)}, "max_ms": {json.dumps(high)}}}'
        for action, low, high in rows
    )
    pinned = json.dumps([str(action) for action in bounds.pinned])
    transfers = json.dumps({f"{a}>{b}": ms for (a, b), ms in bounds.transfers_ms.items()})
    return (
        f'{{\n  "bounds": {{\n{table}\n  }},\n  "pinned": {pinned},\n'
        f'  "message_ms": {json.dumps(bounds.message_ms)},\n'
        f'  "transfers_ms": {transfers}\n}}\n'
    )


def bounds_from_json(dag: PipelineDag, text: str) -> DurationBounds:
    """Read bounds written by ``bounds_to_json`` and check that they belong to ``dag``.

    Args:
        dag: Precedence graph of A actions.
        text: The JSON text; its rows may come in any order.

    Returns:
        DurationBounds: Bounds in the order of ``dag.actions``.

    Raises:
        ValueError: If the text has another form, its actions are not those of ``dag``, or
            ``validate_bounds`` refuses the result. The message names the key and its value.
    """
    try:
        data = parse_json(text)
        table = {
            parse_action(key): (
                number_of(f"bounds.{key}.min_ms", field_of(f"bounds.{key}", row, "min_ms")),
                number_of(f"bounds.{key}.max_ms", field_of(f"bounds.{key}", row, "max_ms")),
            )
            for key, row in _object("bounds", field_of("", data, "bounds")).items()
        }
        pinned = _pinned(field_of("", data, "pinned"), table)
        # Files from before these were kept apart have neither.
        message_ms = number_of("message_ms", data.get("message_ms", 0.0), least=0.0)
        transfers_ms = {
            parse_link(key): number_of(f"transfers_ms.{key}", ms, least=0.0)
            for key, ms in _object("transfers_ms", data.get("transfers_ms", {})).items()
        }
    except ValueError as error:
        raise ValueError(f"not the text of duration bounds: {error}") from error
    odd = sorted(map(str, set(table) ^ set(dag.actions)))
    if odd:
        raise ValueError(
            f"the bounds and the schedule do not have the same actions: {odd[0]} is in only one "
            f"of them ({len(odd)} such actions); measure the bounds with this schedule"
        )
    bounds = _bounds(
        [table[action][0] for action in dag.actions],
        [table[action][1] for action in dag.actions],
        pinned,
    )
    bounds = replace(bounds, message_ms=message_ms, transfers_ms=transfers_ms)
    validate_bounds(dag, bounds)
    return bounds


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object")
    return value


def _pinned(names: Any, table: Mapping[Action, tuple[float, float]]) -> tuple[Action, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"pinned is {shown(names)}; it must be a list of actions")
    pinned = tuple(parse_action(name) for name in names)
    if strange := [action for action in pinned if action not in table]:
        raise ValueError(f"pinned has {strange[0]}, which is not among the bounds")
    return pinned


def _bounds(
    low: Sequence[float], high: Sequence[float], pinned: tuple[Action, ...] = ()
) -> DurationBounds:
    min_ms = np.array(low, dtype=np.float64)
    max_ms = np.array(high, dtype=np.float64)
    min_ms.setflags(write=False)
    max_ms.setflags(write=False)
    return DurationBounds(min_ms=min_ms, max_ms=max_ms, pinned=pinned)


def parse_link(text: str) -> tuple[int, int]:
    """Read a link between ranks as bounds files name it, such as "0>1".

    Raises:
        ValueError: If it is none.
    """
    sender, _, receiver = text.partition(">")
    if not all(rank.isdecimal() and len(rank) < 10 for rank in (sender, receiver)):
        raise ValueError(f'transfers_ms has {shown(text)}; it must name two ranks, like "0>1"')
    return int(sender), int(receiver)


def _check_samples(dag: PipelineDag, half: str, samples: Mapping[Action, Sequence[float]]) -> None:
    for action in samples:
        if action not in dag.index:
            raise ValueError(f"action {action} has {half} samples but is not in the schedule")
    for action in dag.actions:
        values = samples.get(action, ())
        if len(values) == 0:
            raise ValueError(
                f"action {action} has no {half} sample; each action must run at least once in "
                f"each half of the monitoring phase; choose a later {key('monitor')}"
            )
        for value in values:
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(
                    f"action {action} has a {half} sample of {value} ms; a duration must be finite "
                    f"and not negative; if the clock misread once, choose a later {key('monitor')}"
                )
