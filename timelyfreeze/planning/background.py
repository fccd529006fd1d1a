"""A function called in a process of its own, while this process goes on.

For work that would hold up training: planning a large pipeline takes seconds. A process, not a
thread, because a thread would share the interpreter with the launch of the model's kernels. Not
``multiprocessing``, which would import the training script again. The process sees no GPU, computes
on one thread, and ends with its parent. Its priority is the lowest, but for an awaited call: beside
other work the lowest priority gets next to nothing.

Arguments and answer are pickled; function and arguments must be importable by name.
"""

import ctypes
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, BinaryIO, Generic, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Not `-m`: the package imports this module before Python would run it.
_START = f"from {__name__} import _answer_call; _answer_call()"

# What asks a run to stop. torchrun and schedulers send it to all of a run's processes.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def heeded_signals() -> list[signal.Signals]:
    """Return the signals to stop not ignored since this process's start (as by nohup)."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class BackgroundError(RuntimeError):
    """The process ended without an answer, or with an unreadable answer."""


class BackgroundCall(AbstractContextManager["BackgroundCall[_T]"], Generic[_T]):
    """A call of a function, begun at once.

    Example:
        >>> from math import hypot
        >>> with BackgroundCall(hypot, 3.0, 4.0) as call:
        ...     call.result()  # or go on, and ask ``call.done`` now and then
        5.0
    """

    niceness = 19  # added to that of this process

    def __init__(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._question = pickle.dumps((function, args, kwargs))
        # Processes that make the call, and the files that they write the answer to.
        self._tries: list[tuple[subprocess.Popen[bytes], BinaryIO]] = []
        self._try(self.niceness)

    def _try(self, niceness: int) -> None:
        # Files, not pipes: a pipe that nobody reads stops its writer.
        answer = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as stdin:
            stdin.write(self._question)
            stdin.seek(0)
            process = start_python(_START, str(niceness), stdin=stdin, stdout=answer)
        self._tries.append((process, answer))

    @property
    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return any(process.poll() is not None for process, _ in self._tries)

    def hurry(self) -> None:
        """Repeat the call at this process's own priority; the first answer counts.

        For a call awaited from now on: a process cannot raise its priority again.
        """
        self._try(niceness=0)

    def result(self, timeout_s: float | None = None) -> _T:
        """Wait for the answer.

        Raises the function's exception, with its traceback in the process as a note;
        BackgroundError if the process ended without an answer, or has none in time.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.done:
            if time.monotonic() > deadline:
                raise BackgroundError(
                    f"the process that called {self._name} gave no answer within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        first, answer = next(each for each in self._tries if each[0].poll() is not None)
        answer.seek(0)
        try:
            value, error = pickle.load(answer)
        except (EOFError, pickle.UnpicklingError) as problem:
            raise BackgroundError(
                f"the process that called {self._name} ended with exit status "
                f"{first.returncode} and no answer; its last words are on standard error"
            ) from problem
        if error is not None:
            raise error
        found: _T = value
        return found

    def cancel(self) -> None:
        """End the process, if still running, and forget the answer."""
        for process, answer in self._tries:
            process.kill()
            process.wait()
            answer.close()

    def __exit__(self, *error: object) -> None:
        """Cancel a running call."""
        self.cancel()


class AwaitedCall(BackgroundCall[_T]):
    """A call this process only waits for: at its own priority."""

    niceness = 0


def start_python(
    code: str, *arguments: str, stdin: BinaryIO | int, stdout: BinaryIO | int
) -> subprocess.Popen[bytes]:
    """Start a process without GPU, on one thread, deaf to signals to stop.

    The process runs ``code`` with this process's number as first argument.
    """
    with deaf_children():
        return subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid()), *arguments],
            stdin=stdin,
            stdout=stdout,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
        )


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes deaf to signals to stop inside: their parent decides on their end.

    A run asked to stop still needs them for a checkpoint to resume from without a difference.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent_pid: int, with_signal: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends; on Linux only.

    A process killed by SIGKILL ends no children, so they would go on alone. If the parent has ended
    already, the signal is sent now.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal.value, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)


def _answer_call() -> None:
    """Read a call from standard input, make the call, write the answer to standard output."""
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(int(sys.argv[2]))
    # Whatever the function prints belongs on standard error.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    value: Any = None
    error: Exception | None = None
    try:
        function, args, kwargs = pickle.load(sys.stdin.buffer)
        value = function(*args, **kwargs)
    except Exception as problem:
        error = _portable(problem)
        error.add_note("in a background process:\n" + traceback.format_exc())
    try:
        with answer:
            pickle.dump((value, error), answer)
    except OSError as problem:
        sys.exit(f"the answer cannot be written: {problem}")


def _portable(error: Exception) -> Exception:
    """Return ``error``, or an equal message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
