"""The finished checkpoints of a run, and where they lie."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.hf_folder import INDEX_FILE

METADATA = ".metadata"
SETTINGS_FILE = "settings.json"


def read_run_settings(run: Path) -> dict[str, Any]:
    """Return the configuration that a run was started with.

    Args:
        run: The run's own folder.

    Raises:
        ValueError: If there is none, or it is no JSON object.
    """
    path = run / SETTINGS_FILE
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is {type(settings).__name__}; it must be an object")
    return settings


def checkpoint_folder(run: Path, settings: Mapping[str, Any]) -> Path:
    """Return where a run's checkpoints lie beside it, also if both were moved together.

    Args:
        run: The run's own folder, ``<dump_folder>/<save_tb_folder>/<name>``.
        settings: As :func:`read_run_settings` returns them.

    Raises:
        ValueError: If the settings do not say.
    """
    try:
        depth = len(Path(settings["metrics"]["save_tb_folder"]).parts)
        name = settings["checkpoint"]["folder"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / SETTINGS_FILE} lacks {error}") from None
    return run.resolve().parents[depth] / name


def finished_steps(checkpoints: Path) -> dict[int, Path]:
    """Return the folders of finished checkpoints by their step; what is written last is there."""
    found = {}
    for folder in checkpoints.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", folder.name)
        if match and ((folder / METADATA).is_file() or (folder / INDEX_FILE).is_file()):
            found[int(match[1])] = folder
    return found
