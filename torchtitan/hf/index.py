"""Which file of a Hugging Face folder holds which tensor, by the folder's index."""

from __future__ import annotations

from pathlib import Path

from timelyfreeze.files import read_object
from torchtitan.checkpoints.finished import INDEX_FILE


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor; nothing where a folder has no index.

    Raises:
        ValueError: If the index is none.
    """
    path = folder / INDEX_FILE
    try:
        files: dict[str, str] = read_object(path)["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError("weight_map must give the file of each tensor")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no index of tensors: {error!r}") from error
    return files


def file_numbers(folder: str | None) -> dict[str, int] | None:
    """Return the number of each tensor's file from 1, by which upstream names what it saves.

    Upstream itself looks for digits in the files' names, which may have none, or others.

    Args:
        folder: None for none.

    Returns:
        None where the folder has no index: one file then holds all.

    Raises:
        ValueError: If the index is none.
    """
    files = {} if folder is None else read_index(Path(folder))
    places = {file: number for number, file in enumerate(sorted(set(files.values())), start=1)}
    return {name: places[file] for name, file in files.items()} or None
