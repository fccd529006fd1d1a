"""A process that ends with the one that started it, however that ends.

Whoever is killed by SIGKILL ends nothing itself, so its children would go on without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent_pid: int, with_signal: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends; on Linux only.

    Args:
        parent_pid: The parent, which may have ended already.
        with_signal: Sent then, or now if it has.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal.value, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)
