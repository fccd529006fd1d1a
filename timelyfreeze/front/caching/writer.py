"""Work that is done behind the training, of which a limited amount may wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class BehindWriter:
    """A thread that runs one job after the other."""

    def __init__(self, n_waiting: int) -> None:
        self._jobs: SimpleQueue[tuple[Job, bool] | None] = SimpleQueue()
        self._room = threading.BoundedSemaphore(n_waiting)
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
        self._thread.start()

    def offer(self, job: Job) -> bool:
        """Run ``job`` later, unless too many wait; return whether it will be. Never blocks."""
        if not self._room.acquire(blocking=False):
            return False
        self._jobs.put((job, True))
        return True

    def add(self, job: Job) -> None:
        """Run ``job`` later, however many wait."""
        self._jobs.put((job, False))

    def flush(self) -> None:
        """Wait until all jobs so far have run."""
        done = threading.Event()
        self.add(done.set)
        done.wait()

    def close(self) -> None:
        """Run what waits, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, counts = entry
            try:
                job()
            except Exception:
                logger.exception("The writer of the activation cache goes on after an error")
            finally:
                if counts:
                    self._room.release()
