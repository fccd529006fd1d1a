"""Timelines as files: JSON with a line for each action, and where a run keeps those it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from timelyfreeze.files import field_of, keys_of, number_of, parse_json, shown, truth_of, whole_of
from timelyfreeze.records.timeline import MEASURED, ORIGINS, Block, Timeline
from timelyfreeze.schedule import parse_action
from timelyfreeze.settings import Phase

# Ten thousand years: sums of such times are numbers, and can be drawn.
_MOST_MS = 1e15


def timeline_to_json(timeline: Timeline) -> str:
    """Write a timeline as JSON, a line for each action; undone exactly by ``timeline_from_json``.

    Batch time and bubble shares are in it for readers, though they follow from the rest.
    """
    head = {
        "origin": timeline.origin,
        "phase": timeline.phase.value,
        "step": timeline.step,
        "entry_stage": timeline.entry_stage,
        "batch_ms": timeline.batch_ms,
        "bubble": timeline.bubble,
        "rank_bubbles": list(timeline.rank_bubbles),
    }
    rows = ",\n".join(
        f'    "{block.action}": {json.dumps(_plain(block))}' for block in timeline.blocks
    )
    top = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in head.items())
    return f'{{\n{top}  "actions": {{\n{rows}\n  }}\n}}\n'


def _plain(block: Block) -> dict[str, Any]:
    return {
        "rank": block.rank,
        "start_ms": block.start_ms,
        "end_ms": block.end_ms,
        "freeze_ratio": block.freeze_ratio,
        "critical": block.is_critical,
    }


def _block(key: str, row: Any) -> Block:
    """Return the block that ``_plain`` wrote."""
    action = parse_action(key)
    where = f"actions.{action}"

    def number(name: str, most: float) -> float:
        return number_of(f"{where}.{name}", field_of(where, row, name), least=0.0, most=most)

    return Block(
        action,
        whole_of(f"{where}.rank", field_of(where, row, "rank")),
        number("start_ms", _MOST_MS),
        number("end_ms", _MOST_MS),
        number("freeze_ratio", 1.0),
        truth_of(f"{where}.critical", field_of(where, row, "critical")),
    )


def timeline_file(run_folder: Path, phase: Phase) -> Path:
    """Return where a run keeps what it measured of a phase."""
    return run_folder / "timelines" / f"{MEASURED}_{phase.value}.json"


def timeline_files(run_folder: Path) -> list[Path]:
    """Return the files of what a run has measured, in the order of phases."""
    return [file for phase in Phase if (file := timeline_file(run_folder, phase)).exists()]


def timeline_from_json(text: str) -> Timeline:
    """Read a timeline written by ``timeline_to_json``.

    Raises:
        ValueError: If the text has another form, or its actions are no complete pipeline.
    """
    try:
        data = parse_json(text)
        rows = field_of("", data, "actions")
        blocks = tuple(_block(key, rows[key]) for key in keys_of("actions", rows))
        step = field_of("", data, "step")
        step = None if step is None else whole_of("step", step)
        entry = data.get("entry_stage")  # files of earlier versions have none
        entry = None if entry is None else whole_of("entry_stage", entry)
        origin, phase = field_of("", data, "origin"), field_of("", data, "phase")
        known = [one.value for one in Phase]
        if phase not in known:
            raise ValueError(f"phase is {shown(phase)}; known: {', '.join(known)}")
        if origin not in ORIGINS:
            raise ValueError(f"origin is {shown(origin)}; known: {', '.join(ORIGINS)}")
    except ValueError as error:
        raise ValueError(f"not the text of a timeline: {error}") from error
    timeline = Timeline(origin, Phase(phase), blocks, step, entry)
    if [lane[0].rank for lane in timeline.lanes] != list(range(timeline.n_ranks)):
        raise ValueError("the timeline's actions are not sorted by rank, or a rank has none")
    for block in blocks:
        if not block.start_ms <= block.end_ms:
            raise ValueError(
                f"action {block.action} runs from {block.start_ms} to {block.end_ms} ms; it must "
                "not end before it begins"
            )
    n_stages = timeline.order.n_stages  # refuses what is no complete pipeline
    if entry is not None and entry >= n_stages:
        raise ValueError(f"entry_stage is {entry}; the stages are 0 to {n_stages - 1}")
    return timeline
