"""A file that one process holds until it ends, however it ends; on shared file systems too."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """Holds a file, which is made and stays; what the process forks does not hold it.

    Raises:
        BlockingIOError: If another process holds it.
        OSError: If it cannot be made, or its file system knows no locks.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(self._descriptor)
        except OSError:
            self.close()
            raise
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Let others have it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_held(file: Path) -> bool:
    """Return whether another process holds a file; leaves nothing behind."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        _lock(descriptor)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int) -> None:
    # Linux hands this one to the server of a network file system.
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
