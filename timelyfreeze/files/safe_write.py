"""Files read by others during their replacement, and folders without room for files."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path


def make_new(place: Path, name: str, make: Callable[[Path], None] = Path.mkdir) -> Path:
    """Make a folder, or a file, exclusively for this process; and its folder ``place``.

    A number follows a name in use.
    """
    place.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = place / (name if number == 1 else f"{name}_{number}")
        with suppress(FileExistsError):
            make(path)
            break
    return path


def write_whole(file: Path, content: bytes, unfinished: Path | None = None) -> Path:
    """Replace a file atomically, and make its folder.

    Args:
        file: The file.
        content: All of it.
        unfinished: The name until then, on the same disk; processes writing a file at once need
            different names. None for a name beside the file, removed if writing fails.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if unfinished is None:
        unfinished = make_new(file.parent, f"{file.name}.part", partial(Path.touch, exist_ok=False))
    try:
        unfinished.write_bytes(content)
        return unfinished.replace(file)
    except BaseException as error:  # Ctrl-C too
        if isinstance(error, OSError):
            error.filename = str(file)
        unfinished.unlink(missing_ok=True)
        raise


def append_whole(file: Path, text: str) -> None:
    """Add lines to a file, or none of them where the disk is full.

    Where the last line was cut off nevertheless, the new ones begin on a line of their own.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        left = (b"\n" if is_cut else b"") + text.encode()
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with suppress(OSError):  # a device has no length
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write_obstacle(folder: Path) -> str | None:
    """Return why a folder, there or to be made, can take no file; None if it can.

    Nothing is left there.
    """
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        return f"it can be no folder: {getattr(error, 'strerror', None) or error}"
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{str(place)!r} is no folder"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        return f"nothing can be written to {str(place)!r}: {reason}"
