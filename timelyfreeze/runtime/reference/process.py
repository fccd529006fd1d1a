"""A reference in a process of its own: at the lowest priority, on one thread, waited for by nobody.

Two threads of the training process write to it and read from it, so no call here waits for the
other side. If the process dies, it is told and started again with the blocks that it had. Messages
are pickles, each after its length, so that one that cannot be read leaves the next alone.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from timelyfreeze.planning import end_with_parent, start_python
from timelyfreeze.policies import Difference, ReferenceSettings
from timelyfreeze.runtime.reference.model import CapturedBatch, ReferenceModel

logger = logging.getLogger(__name__)

_START = "from timelyfreeze.runtime.reference.process import serve; serve()"
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
        pipe = subprocess.PIPE
        self._process = start_python(_START, stdin=pipe, stdout=pipe)
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
            if isinstance(answer, WorkerMessage):
                self._n_waiting -= answer.is_failure
                self._n_lost += answer.is_failure
                self._tell(answer)
            else:
                self._n_waiting -= 1
                self._n_deaths = 0
                self._found.append(answer)

    def _tell(self, answer: WorkerMessage) -> None:
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
                answers.append(WorkerMessage(f"it cannot be sent: {error}", question[0] == "batch"))
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


_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class WorkerMessage:
    """Something to log."""

    text: str  # what to say
    is_failure: bool  # whether a batch that was sent has no difference because of it


def pickled(value: Any) -> bytes:
    """Return a value as bytes, blocks with attention kernels that they have chosen included."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Knows torch's kernels of attention, whose class cannot be found by the name it has."""

    def reducer_override(self, value: Any) -> Any:
        return (_backend, (int(value),)) if isinstance(value, SDPBackend) else NotImplemented


def _backend(number: int) -> Any:
    return SDPBackend(number)


def write_message(stream: BinaryIO, message: bytes) -> None:
    """Write a pickled message and send it off."""
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def read_messages(stream: BinaryIO) -> Iterator[bytes]:
    """Yield pickled messages until the stream ends, if need be in the middle of one."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if len(message := stream.read(length)) < length:
            return
        yield message


def search_paths(blocks: nn.ModuleList) -> dict[str, list[str]]:
    """Return where the packages of the blocks' classes look for modules: some add folders."""
    tops = {type(module).__module__.partition(".")[0] for module in blocks.modules()}
    found = {top: getattr(sys.modules.get(top), "__path__", None) for top in sorted(tops)}
    return {top: list(paths) for top, paths in found.items() if paths is not None}


def serve() -> None:
    """Answer until standard input ends; standard output is for answers alone."""
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(19)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    messages = read_messages(sys.stdin.buffer)
    settings = pickle.loads(next(messages))
    with suppress(BrokenPipeError):
        for answer in answers_to(messages, settings):
            write_message(answers, pickled(answer))


def answers_to(messages: Iterator[bytes], settings: ReferenceSettings) -> Iterator[Any]:
    """Yield a :class:`Difference` or :class:`WorkerMessage` for each batch, and other messages."""
    model: ReferenceModel | None = None
    why = "no blocks were sent"
    for message in messages:
        is_batch = True
        try:
            kind, content = pickle.loads(message)
            if kind == "paths":
                is_batch = False
                _add_paths(content)
            elif kind == "blocks":
                is_batch, model, why = False, None, "its blocks could not be made"
                model = ReferenceModel(pickle.loads(content), settings)
                if model.note is not None:
                    yield WorkerMessage(
                        f"its linear layers compute in float32: {model.note}", False
                    )
            else:
                if model is None:
                    raise ValueError(why)
                yield model.difference(content)
        except Exception as error:  # whatever somebody's blocks raise
            yield WorkerMessage(f"{type(error).__name__}: {error}", is_batch)


def _add_paths(paths: Mapping[str, Sequence[str]]) -> None:
    for top, folders in paths.items():
        package = importlib.import_module(top)
        missing = [folder for folder in folders if folder not in package.__path__]
        package.__path__ = [*package.__path__, *missing]
