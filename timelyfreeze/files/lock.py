"""A file held by a process until its end, of any kind; on shared file systems too."""

import fcntl
import os
from pathlib import Path


class FileLock:
    """Holds a file, made if missing and never removed; forks do not inherit the lock.

    Raises:
        BlockingIOError: If another process holds the file.
        OSError: If the file cannot be made, or its file system knows no locks.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = _locked(file, os.O_RDWR | os.O_CREAT)
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_held(file: Path) -> bool:
    """Return whether another process holds a file; leaves nothing behind."""
    try:
        os.close(_locked(file, os.O_RDWR))
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _locked(file: Path, flags: int) -> int:
    descriptor = os.open(file, flags, 0o644)
    try:
        # Linux hands this one to the server of a network file system.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
