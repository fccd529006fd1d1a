"""A reference in a process of its own: at the lowest priority, on one thread, without waits.

A thread of the training process asks question after question, so no call here waits. A dead process
is logged and started again with the same blocks. Messages are separate pickles, so that an
unreadable message leaves the next alone.
"""

from __future__ import annotations

import copyreg
import importlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from timelyfreeze.planning import end_with_parent, start_python
from timelyfreeze.policies import Difference, ReferenceSettings
from timelyfreeze.runtime.reference.model import CapturedBatch, InlineReference

logger = logging.getLogger(__name__)

_START = "from timelyfreeze.runtime.reference.process import serve; serve()"
# Deaths in a row without an answer in between, after which it is not started again.
_MAX_DEATHS = 3


class ReferenceProcess:
    """Compares in another process, with the methods of ``InlineReference``."""

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
        """Number of the process; None before the first blocks and after giving up."""
        return None if self._process is None else self._process.pid

    def load(self, blocks: nn.ModuleList) -> None:
        """Compare with these blocks from now on, and keep them, should the process die."""
        self._look()
        self._blocks = blocks
        if self._process is not None:
            self._questions.put(blocks)
        elif self._n_deaths < _MAX_DEATHS:
            self._begin()

    def offer(self, batch: CapturedBatch) -> bool:
        """Have a batch compared if there is room in the queue."""
        self._look()
        if self._process is None or self._n_waiting >= self._settings.queue_length:
            return False
        self._n_waiting += 1
        self._questions.put(batch)
        return True

    def take(self) -> tuple[list[Difference], int]:
        """Return the results since the last call, and the number of lost batches."""
        self._look()
        found, self._found = self._found, []
        n_lost, self._n_lost = self._n_lost, 0
        return found, n_lost

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._questions.put(None)
            self._process = None

    def _begin(self) -> None:
        """Start a process and its asking thread, and send the blocks."""
        ours, theirs = Pipe()
        with theirs:
            # Whatever somebody's blocks print belongs on standard error.
            self._process = start_python(_START, stdin=theirs.fileno(), stdout=2)
        # Of its own: what an older process may still say is not mixed up with this one's.
        self._questions, self._answers = queue.SimpleQueue(), deque()
        self._n_waiting = 0
        known = self._process, ours, self._questions, self._answers, self._settings
        threading.Thread(target=_ask, args=known, daemon=True).start()
        self._questions.put(self._blocks)

    def _look(self) -> None:
        """Take the present answers; restart a dead process."""
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, WorkerMessage):
                self._n_waiting -= answer.is_failure
                self._n_lost += answer.is_failure
                self._tell(answer)
            else:
                self._n_waiting -= 1
                self._n_deaths = 0
                self._found.append(answer)
        if self._process is not None and self._process.poll() is not None:
            self._revive(self._process.returncode)

    def _tell(self, answer: WorkerMessage) -> None:
        if answer.text not in self._told:
            self._told.add(answer.text)
            what = "No plasticity: " if answer.is_failure else "The reference for plasticity: "
            logger.warning("%s%s", what, answer.text)

    def _revive(self, status: int) -> None:
        self.close()
        self._n_lost += self._n_waiting
        self._n_deaths += 1
        if self._n_deaths >= _MAX_DEATHS:
            self._n_waiting = 0
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
            self._n_waiting,
        )
        self._begin()


def _ask(
    process: subprocess.Popen[bytes],
    there: Connection,
    questions: queue.SimpleQueue[Any],
    answers: deque[Any],
    settings: ReferenceSettings,
) -> None:
    """Ask the questions in the queue until None, or until the process is silent."""
    with suppress(EOFError, OSError):
        for question in iter(questions.get, None):
            is_batch = isinstance(question, CapturedBatch)
            try:
                if is_batch:
                    message = pickle.dumps(question.arrived())
                else:
                    # Blocks a second time: the process finds their classes by the paths first.
                    blocks = pickle.dumps(question)
                    message = pickle.dumps((search_paths(question), settings, blocks))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                answers.append(WorkerMessage(f"it cannot be sent: {error}", is_batch))
                continue
            there.send_bytes(message)
            if (answer := pickle.loads(there.recv_bytes())) is not None:
                answers.append(answer)
    process.kill()  # it may have closed its connection only


@dataclass(frozen=True)
class WorkerMessage:
    """Something to log."""

    text: str  # what to say
    is_failure: bool  # whether a batch that was sent has no difference because of it


def _kernel(number: int) -> Any:
    return SDPBackend(number)


# Blocks may hold kernels of attention that they have chosen, whose class in torch cannot be found
# by the name that it has.
copyreg.pickle(SDPBackend, lambda kernel: (_kernel, (int(kernel),)))


def search_paths(blocks: nn.ModuleList) -> dict[str, list[str]]:
    """Return where the packages of the blocks' classes look for modules: some add folders."""
    tops = {type(module).__module__.partition(".")[0] for module in blocks.modules()}
    found = {top: getattr(sys.modules.get(top), "__path__", None) for top in sorted(tops)}
    return {top: list(paths) for top, paths in found.items() if paths is not None}


def serve() -> None:
    """Answer until standard input, a connection both ways, ends."""
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(19)
    torch.set_num_threads(1)
    there = Connection(sys.stdin.fileno())
    with suppress(EOFError, OSError):
        for answer in answers_to(iter(there.recv_bytes, None)):
            there.send_bytes(pickle.dumps(answer))


def answers_to(messages: Iterable[bytes]) -> Iterator[Difference | WorkerMessage | None]:
    """Yield an answer per message: to a batch its difference, to blocks None for success."""
    reference: InlineReference | None = None
    for message in messages:
        is_batch = True
        try:
            question = pickle.loads(message)
            if is_batch := isinstance(question, CapturedBatch):
                if reference is None:
                    raise ValueError("it has no blocks")
                yield reference.difference(question)
                continue
            reference = None
            paths, settings, blocks = question
            _add_paths(paths)
            made = InlineReference(settings)
            made.load(pickle.loads(blocks))
            reference, told = made, f"its linear layers compute in float32: {made.note}"
            yield None if made.note is None else WorkerMessage(told, False)
        except Exception as error:  # whatever somebody's blocks raise
            yield WorkerMessage(f"{type(error).__name__}: {error}", is_batch)


def _add_paths(paths: Mapping[str, Sequence[str]]) -> None:
    for top, folders in paths.items():
        package = importlib.import_module(top)
        missing = [folder for folder in folders if folder not in package.__path__]
        package.__path__ = [*package.__path__, *missing]
