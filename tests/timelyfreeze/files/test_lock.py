"""A file that is held as long as its process lives, whatever the process leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from timelyfreeze.files import FileLock, is_held

HOLDER = """
import os, signal, sys
from pathlib import Path
from timelyfreeze.files import FileLock
lock = FileLock(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_killed_process_holds_nothing_though_its_children_live(tmp_path: Path) -> None:
    file = tmp_path / "some" / "file.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        assert is_held(file)
        with pytest.raises(BlockingIOError):
            FileLock(file)
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it is there
        assert not is_held(file)
        FileLock(file).close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_it_can_be_let_go_twice(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock")
    first.close()
    second = FileLock(tmp_path / "lock")
    first.close()
    assert is_held(tmp_path / "lock")
    second.close()
