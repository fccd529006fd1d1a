"""The configuration that a checkpoint was saved under, and what differs in a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from timelyfreeze.files import write_whole
from torchtitan.checkpoints.finished import SETTINGS_FILE, read_run_settings

# What a run shows and where it writes; that may always differ.
_OUTPUT = ("checkpoint", "comm", "job", "metrics", "plots", "profiling", "report")


def save_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Write down in the folder of a checkpoint what the run's configuration was.

    Raises:
        OSError: If that cannot be written.
    """
    write_whole(checkpoint / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())


def changed_settings(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value then, value now)} of what changes a run that goes on from a checkpoint.

    Nothing where the checkpoint does not say: it is an older one, or another program's.
    """
    try:
        saved = dict(_values(read_run_settings(checkpoint)))
    except ValueError:
        return {}
    now = dict(_values(json.loads(json.dumps(settings))))
    return {
        key: (saved[key], value)
        for key, value in now.items()
        if key in saved and saved[key] != value and key.partition(".")[0] not in _OUTPUT
    }


def _values(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
