"""A reference in a process of its own: at the lowest priority, on one thread, waited for by nobody.

Two threads of the training process write to it and read from it, so no call here waits for the
other side. If the process dies, it is told and started again with the blocks that it had.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from torch import nn

from timelyfreeze.planning import deaf_children
from timelyfreeze.policies import Difference, ReferenceSettings
from timelyfreeze.runtime.reference.model import CapturedBatch
from timelyfreeze.runtime.reference.worker import (
    Told,
    pickled,
    read_messages,
    search_paths,
    write_message,
)

logger = logging.getLogger(__name__)

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_START = "from timelyfreeze.runtime.reference.worker import serve; serve()"
# Deaths in a row without an answer in between, after which it is not started again.
_MAX_DEATHS = 3
_ENDED = object()


class ReferenceProcess:
    """Compares in another process; see :class:`timelyfreeze.runtime.reference.model.Reference`."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self._settings = settings
        self._blocks: nn.ModuleList | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: deque[Any] = deque()
        self._found: list[Difference] = []
        self._n_waiting = self._n_lost = self._n_deaths = 0
        self._told: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Number of the process; None before the first blocks and after it was given up."""
        return None if self._process is None else self._process.pid

    def load(self, blocks: nn.ModuleList) -> None:
        """Compare with these blocks from now on, and keep them, should the process die."""
        self._look()
        self._blocks = blocks
        if self._process is not None:
            self._questions.put(("blocks", blocks))
        elif self._n_deaths < _MAX_DEATHS:
            self._begin()

    def offer(self, batch: CapturedBatch) -> bool:
        """Have a batch compared if there is room for it in the queue."""
        self._look()
        if self._process is None or self._n_waiting >= self._settings.queue_length:
            return False
        self._n_waiting += 1
        self._questions.put(("batch", batch))
        return True

    def take(self) -> tuple[list[Difference], int]:
        """Return what was found since the last call, and how many accepted batches were lost."""
        self._look()
        found, self._found = self._found, []
        n_lost, self._n_lost = self._n_lost, 0
        return found, n_lost

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._questions.put(_ENDED)
            self._process = None

    def _begin(self) -> None:
        """Start a process with its two threads, and send it the blocks."""
        assert self._blocks is not None  # the caller saw to it
        with deaf_children():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        # Of its own: what an older process may still say is not mixed up with this one's.
        self._questions, self._answers = queue.SimpleQueue(), deque()
        self._n_waiting = 0
        _run(_send, self._process.stdin, self._questions, self._answers)
        _run(_receive, self._process.stdout, self._answers)
        self._questions.put(self._settings)
        self._questions.put(("paths", search_paths(self._blocks)))
        self._questions.put(("blocks", self._blocks))

    def _look(self) -> None:
        """Take the answers that are there; start the process again if it has died."""
        while self._answers:
            answer = self._answers.popleft()
            if answer is _ENDED:
                self._revive()
                return
            if isinstance(answer, Told):
                self._n_waiting -= answer.is_failure
                self._n_lost += answer.is_failure
                self._tell(answer)
            else:
                self._n_waiting -= 1
                self._n_deaths = 0
                self._found.append(answer)

    def _tell(self, answer: Told) -> None:
        if answer.text not in self._told:
            self._told.add(answer.text)
            what = "No plasticity: " if answer.is_failure else "The reference for plasticity: "
            logger.warning("%s%s", what, answer.text)

    def _revive(self) -> None:
        if self._process is None:
            return  # closed
        self._process.kill()  # it may have closed its output only
        status = self._process.wait()
        self._questions.put(_ENDED)
        self._process = None
        self._n_lost += self._n_waiting
        self._n_deaths += 1
        n_lost, self._n_waiting = self._n_waiting, 0
        if self._n_deaths >= _MAX_DEATHS:
            logger.error(
                "The reference process ended with exit status %d, %d times without an answer; it "
                "is not started again, so nothing more will be frozen or evaluated",
                status,
                self._n_deaths,
            )
            return
        logger.warning(
            "The reference process ended with exit status %d; it is started again, and the %d "
            "evaluations that it had are left out",
            status,
            n_lost,
        )
        self._begin()


def _run(target: Callable[..., None], *args: Any) -> None:
    name = f"reference {target.__name__.strip('_')}"
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


def _send(stream: BinaryIO, questions: queue.SimpleQueue[Any], answers: deque[Any]) -> None:
    """Write what is in the queue; ends with the process, or where the queue says so."""
    try:
        while (question := questions.get()) is not _ENDED:
            try:
                message = _portable(question)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                answers.append(Told(f"it cannot be sent: {error}", question[0] == "batch"))
            else:
                write_message(stream, message)
    except OSError:
        pass  # it has died, which the other thread sees
    with suppress(OSError):
        stream.close()


def _portable(question: Any) -> bytes:
    """Return it pickled: batches once they have arrived, blocks a second time.

    So the process knows that blocks have come before it looks for their classes.
    """
    kind, content = question if isinstance(question, tuple) else (None, None)
    if kind == "batch":
        return pickled((kind, content.arrived()))
    if kind == "blocks":
        return pickled((kind, pickled(content)))
    return pickled(question)


def _receive(stream: BinaryIO, answers: deque[Any]) -> None:
    """Read answers until there are no more."""
    for answer in read_messages(stream):
        answers.append(pickle.loads(answer))
    stream.close()
    answers.append(_ENDED)
