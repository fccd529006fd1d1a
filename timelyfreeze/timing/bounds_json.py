"""Bounds as JSON: ``bounds.json`` of a run or a profile, and bounds in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from timelyfreeze.files import field_of, keys_of, list_of, number_of, parse_json, shown
from timelyfreeze.schedule import Action, PipelineDag, parse_action
from timelyfreeze.timing.bounds import DurationBounds, make_bounds, validate_bounds


@dataclass(frozen=True)
class BoundsTable:
    """Bounds as they stand in a file, which need not fit a schedule.

    Attributes:
        pairs: (shortest, longest) duration of every action, milliseconds.
        pinned: As in ``DurationBounds``.
        p2p_overhead_ms: As in ``DurationBounds``.
        p2p_latency_ms: As in ``DurationBounds``.
        outside_ms: As in ``DurationBounds``.
        interval_factor: As in ``DurationBounds``.
        captured: As in ``DurationBounds``.
    """

    pairs: Mapping[Action, tuple[float, float]]
    pinned: tuple[Action, ...]
    p2p_overhead_ms: float
    p2p_latency_ms: Mapping[tuple[int, int], float]
    outside_ms: float
    interval_factor: float | None
    captured: float


def bounds_to_json(dag: PipelineDag, bounds: DurationBounds) -> str:
    """Write bounds as JSON, one line per action; undone exactly by ``bounds_from_json``.

    An object with ``bounds`` (action to ``min_ms`` and ``max_ms``), ``pinned``,
    ``p2p_overhead_ms``, ``p2p_latency_ms`` (by link: "0>1" from rank 0 to rank 1), ``outside_ms``,
    ``interval_factor`` and ``captured``.

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
    latency = json.dumps({f"{a}>{b}": ms for (a, b), ms in bounds.p2p_latency_ms.items()})
    return (
        f'{{\n  "bounds": {{\n{table}\n  }},\n  "pinned": {pinned},\n'
        f'  "p2p_overhead_ms": {json.dumps(bounds.p2p_overhead_ms)},\n'
        f'  "p2p_latency_ms": {latency},\n'
        f'  "outside_ms": {json.dumps(bounds.outside_ms)},\n'
        f'  "interval_factor": {json.dumps(bounds.interval_factor)},\n'
        f'  "captured": {json.dumps(bounds.captured)}\n}}\n'
    )


def parse_bounds(data: Any) -> BoundsTable:
    """Read what the JSON of ``bounds_to_json`` holds; all but ``bounds`` may be missing.

    Raises:
        ValueError: If it has another form. The message names the key and its value.
    """
    pairs = {}
    holder = field_of("", data, "bounds")
    for key in keys_of("bounds", holder):
        where, row = f"bounds.{key}", holder[key]
        keys_of(where, row)
        low, high = (
            number_of(f"{where}.{name}", row.get(name), least=0.0) for name in ("min_ms", "max_ms")
        )
        pairs[parse_action(key)] = (low, high)
    latency = data.get("p2p_latency_ms", {})
    factor = data.get("interval_factor")
    return BoundsTable(
        pairs,
        _pinned(data.get("pinned", []), pairs),
        number_of("p2p_overhead_ms", data.get("p2p_overhead_ms", 0.0), least=0.0),
        {
            _link(key): number_of(f"p2p_latency_ms.{key}", latency[key], least=0.0)
            for key in keys_of("p2p_latency_ms", latency)
        },
        number_of("outside_ms", data.get("outside_ms", 0.0), least=0.0),
        None if factor is None else number_of("interval_factor", factor, least=1.0),
        number_of("captured", data.get("captured", 0.0), least=0.0),
    )


def bounds_from_json(dag: PipelineDag, text: str) -> DurationBounds:
    """Read bounds written by ``bounds_to_json``, rows in any order, and see that they fit ``dag``.

    Raises:
        ValueError: If the text has another form, its actions are not those of ``dag``, or
            ``validate_bounds`` refuses the result. The message names the key and its value.
    """
    try:
        table = parse_bounds(parse_json(text))
    except ValueError as error:
        raise ValueError(f"not the text of duration bounds: {error}") from error
    odd = sorted(map(str, set(table.pairs) ^ set(dag.actions)))
    if odd:
        raise ValueError(
            f"the bounds and the schedule do not have the same actions: {odd[0]} is in only one "
            f"of them ({len(odd)} such actions); measure the bounds with this schedule"
        )
    low, high = zip(*(table.pairs[action] for action in dag.actions), strict=True)
    bounds = replace(
        make_bounds(low, high, table.pinned),
        p2p_overhead_ms=table.p2p_overhead_ms,
        p2p_latency_ms=table.p2p_latency_ms,
        outside_ms=table.outside_ms,
        interval_factor=table.interval_factor,
        captured=table.captured,
    )
    validate_bounds(dag, bounds)
    return bounds


def _pinned(names: Any, pairs: Mapping[Action, Any]) -> tuple[Action, ...]:
    if not all(isinstance(name, str) for name in list_of("pinned", names)):
        raise ValueError(f"pinned is {shown(names)}; it must be a list of actions")
    pinned = tuple(map(parse_action, names))
    if strange := [action for action in pinned if action not in pairs]:
        raise ValueError(f"pinned has {strange[0]}, which is not among the bounds")
    return pinned


def _link(text: str) -> tuple[int, int]:
    """Read a link between ranks, such as "0>1"."""
    sender, _, receiver = text.partition(">")
    if not all(rank.isdecimal() and len(rank) < 10 for rank in (sender, receiver)):
        raise ValueError(f'p2p_latency_ms has {shown(text)}; it must name two ranks, like "0>1"')
    return int(sender), int(receiver)
