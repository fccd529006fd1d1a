"""Files that others may read while they are written anew."""

from __future__ import annotations

from pathlib import Path


def write_whole(file: Path, content: bytes) -> Path:
    """Write a file so that readers see the old content or the new, and make its folder.

    Returns:
        The file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.write_bytes(content)
    return unfinished.replace(file)
