"""A signal to stop, obeyed by all ranks after the same step."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from timelyfreeze.planning import STOP_SIGNALS, heeded_signals

_is_listening = False


def _end_by_the_rank_alone() -> None:
    """End reading workers by their rank's word; torch would end them by SIGTERM."""
    if _is_listening:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=_wait_for, args=(os.getppid(),), daemon=True).start()


def _wait_for(rank: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != rank:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_end_by_the_rank_alone)


class StopRequest:
    """A signal to stop at any rank, known to all ranks a step later.

    A rank stopping alone would leave others waiting. So before every step ranks send their
    ``heard`` signal, 0 for none, and read the messages of a step ago, which have long arrived.
    Without a timeout there are no others, and signals end the process as usual.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._group: dist.ProcessGroup | None = None
        if timeout is not None:
            # Between hosts, whatever the model's messages run over: no device is waited for.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.heard = 0
        self._said = torch.zeros((), dtype=torch.int64)
        self._on_its_way: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals instead of ending by them; further ones change nothing.

        Signals ignored at the start, as by nohup, stay ignored.
        """
        # Only the main thread may handle signals.
        if self._group is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        global _is_listening
        former = {number: signal.signal(number, self._hear) for number in heeded_signals()}
        _is_listening = True
        try:
            yield
        finally:
            _is_listening = False
            for number, handler in former.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = self.heard or number

    def agreed(self) -> signal.Signals | None:
        """Return the signal to end the run now; a question of all ranks before a step."""
        found = self.settled()
        if found is None and self._group is not None:
            self._said = torch.tensor(self.heard, dtype=torch.int64)
            self._on_its_way = dist.all_reduce(
                self._said, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
        return found

    def is_so_anywhere(self, is_so: bool) -> bool:
        """Return whether a condition holds on any rank; a collective call of all ranks."""
        heard = torch.tensor(int(is_so), dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group)
        return bool(heard)

    def close(self) -> None:
        """Release the group, unless messages of a dead rank are on their way."""
        is_silent = self._on_its_way is None or self._on_its_way.is_completed()
        group, self._group = self._group, None
        if group is not None and is_silent:
            self._on_its_way = None
            dist.destroy_process_group(group)

    def settled(self) -> signal.Signals | None:
        """Return the common answer of the last :meth:`agreed`, without asking again."""
        if self._on_its_way is not None:
            self._on_its_way.wait()
            self._on_its_way = None
        return signal.Signals(int(self._said)) if int(self._said) else None
