"""The finished checkpoints of a run, and where they lie."""

import io
import json
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from timelyfreeze.files import read_object, table_values, write_whole
from torchtitan.checkpoints.contents import METADATA, cause_of, read_contents

INDEX_FILE = "model.safetensors.index.json"  # of a Hugging Face folder
SETTINGS_FILE = "settings.json"
TRAIN_STATE = "train_state"


def read_run_settings(run: Path) -> dict[str, Any]:
    """Return a run's start configuration, from its folder, or ValueError."""
    try:
        return read_object(run / SETTINGS_FILE)
    except OSError as error:
        raise ValueError(f"{run / SETTINGS_FILE} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from None


def all_steps(checkpoints: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by step, also unfinished."""
    folders = checkpoints.glob("step-*")
    found = ((re.fullmatch(r"step-(0|[1-9]\d*)", folder.name), folder) for folder in folders)
    return {int(match[1]): folder for match, folder in found if match}


def finished_steps(checkpoints: Path) -> dict[int, Path]:
    """Return the folders of finished checkpoints by step; the file written last is there."""
    return {
        step: folder
        for step, folder in all_steps(checkpoints).items()
        if any((folder / last).is_file() for last in (METADATA, INDEX_FILE))
    }


def chosen_step(run: Path, settings: Mapping[str, Any], step: int | None) -> tuple[int, Path]:
    """Return a finished checkpoint of a run, the last without ``step``, or ValueError.

    Checkpoints lie beside the run's folder, also if both were moved together.
    """
    try:
        depth = len(Path(settings["metrics"]["save_tb_folder"]).parts)
        checkpoints = run.resolve().parents[depth] / settings["checkpoint"]["folder"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / SETTINGS_FILE} lacks {error}") from None
    steps = finished_steps(checkpoints)
    if not steps:
        raise ValueError(
            f"{checkpoints} has no finished checkpoint; a run writes them with checkpoint.enable"
        )
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise ValueError(f"{checkpoints} has no checkpoint of step {step}; it has {known}")
    return chosen, steps[chosen]


def resumable_step(steps: Mapping[int, Path], excluded: Sequence[str] = ()) -> int | None:
    """Return the last step with more than the model alone, to resume from; or None."""
    return next(
        (step for step in sorted(steps, reverse=True) if is_whole(steps[step], excluded)), None
    )


def is_whole(folder: Path, excluded: Sequence[str] = ()) -> bool:
    """Return whether a checkpoint can be resumed: at step 0 the model alone."""
    if TRAIN_STATE in excluded or folder.name == "step-0" or damage(folder) is not None:
        return True  # what is damaged is told as that
    return any(key.startswith(f"{TRAIN_STATE}.") for key in saved_keys(folder))


def model_only_error(folder: Path) -> str:
    """Return why a run cannot resume from an incomplete checkpoint, and advice."""
    return (
        f"the checkpoint {str(folder)!r} holds the model alone (checkpoint.last_save_model_only), "
        "so a run cannot go on from it; checkpoint.load_step names another, if there is one; a new "
        f"run begins with its weights by checkpoint.initial_load_path = {str(folder)!r} and "
        "another checkpoint.folder"
    )


def damage(folder: Path) -> str | None:
    """Return missing or short files of a finished checkpoint; None if complete.

    A full disk, or an interrupted copy, leaves short files. Their content is not looked at.
    """
    if not (folder / METADATA).is_file():
        return None if (folder / INDEX_FILE).is_file() else f"it has no {METADATA}"
    try:
        metadata = read_contents(folder)
        pieces = dict(metadata.storage_data or {}).values()
        needed: dict[str, int] = {}
        for piece in pieces:
            end = piece.offset + piece.length
            needed[piece.relative_path] = max(end, needed.get(piece.relative_path, 0))
    except Exception as error:  # a file that is no pickle can raise anything
        return f"its {METADATA} cannot be read: {str(error) or type(error).__name__}"
    for name, n_bytes in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            return f"it lacks {name}"
        if file.stat().st_size < n_bytes:
            return f"{name} has {file.stat().st_size} bytes and must have {n_bytes}"
    return None


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a finished checkpoint; nothing if they cannot be read."""
    saved = saved_keys(folder).items()
    return {name: tuple(one.size) for name, one in saved if isinstance(one, TensorStorageMetadata)}


def saved_keys(folder: Path) -> dict[str, Any]:
    """Return the full names in a finished checkpoint; empty if unreadable."""
    try:
        return read_contents(folder).state_dict_metadata
    except Exception:  # a file that is no pickle can raise anything; whoever loads it is told
        return {}


def saved_values(folder: Path, names: Collection[str]) -> dict[str, Any]:
    """Return plain values of a checkpoint, without executing code; ValueError for others."""
    stored = read_contents(folder).storage_data or {}
    places = {index.fqn: at for index, at in stored.items()}
    values = {}
    for name in names:
        if name not in places:
            raise ValueError(f"{folder} has no {name}")
        place = places[name]
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        try:
            values[name] = torch.load(content, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{name} in {folder} cannot be read: {cause_of(error)}") from error
    return values


# What a run shows and where it writes; that may always differ.
_OUTPUT = ("checkpoint", "comm", "job", "metrics", "plots", "profiling", "report")


def save_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Write the run's configuration into the folder of a checkpoint."""
    write_whole(checkpoint / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())


def changed_settings(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (then, now)} of changed settings; empty without saved settings."""
    try:
        saved = dict(table_values(read_run_settings(checkpoint)))
    except ValueError:
        return {}
    now = dict(table_values(json.loads(json.dumps(settings))))
    return {
        key: (saved[key], value)
        for key, value in now.items()
        if key in saved and saved[key] != value and key.partition(".")[0] not in _OUTPUT
    }
