"""Renders chat templates in a limited process of its own, started once.

A template is somebody's program. Jinja's sandbox bars Python and files; memory, time and the length
of its text are limited here, as a whole and not operator by operator.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from timelyfreeze.files import printable
from timelyfreeze.planning import deaf_children

_WORKER = Path(__file__).with_name("render_worker.py")
# Of an example, as a text for the tokenizer, which takes some 240 bytes for each character of it.
MOST_CHARACTERS = 2_000_000
# Of one example: far beyond what a conversation needs.
_SECONDS, _BYTES = 10.0, 2**29
# Of processor time that examples may take in the mean, and what may be beyond that in all.
_SECONDS_EACH, _SECONDS_BEYOND = 1.0, 60.0


class RenderError(ValueError):
    """A template cannot render, or is no program if it ``is_broken``."""

    def __init__(self, message: str, *, is_broken: bool = False) -> None:
        super().__init__(message)
        self.is_broken = is_broken


class Rendered(NamedTuple):
    """A text of a conversation, with places in it: characters ``[start, end)``.

    ``marked`` are the characters of generation blocks. ``spans`` has for each answer the text added
    to the prompt, but for blanks at its end; None where the whole text has another form.
    """

    text: str
    marked: Sequence[tuple[int, int]]
    spans: Sequence[tuple[int, int] | None]


def render(
    source: str,
    tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]] | None,
    tools: Sequence[Any] = (),
    *,
    prompt: bool = False,
    answers: Sequence[int] = (),
) -> Rendered:
    """Return the text of a conversation; RenderError if the template fails or exceeds a limit.

    Without messages only ``source`` is checked; None stands for no tools. With ``prompt`` the
    generation prompt follows. ``answers`` are places of messages to find in the text.
    """
    limits = {"most": MOST_CHARACTERS, "seconds": _SECONDS, "bytes": _BYTES}
    said = {"messages": messages, "tools": tools or None, "prompt": prompt, "answers": answers}
    try:
        asked = {"source": source, "tokens": tokens, **said, **limits}
        line = json.dumps(asked, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RenderError(f"the example has a value that is no JSON ({error})") from error
    if len(line) > 4 * MOST_CHARACTERS:
        raise RenderError(f"the example has more than {MOST_CHARACTERS} characters")
    answer = _worker.ask(f"{line}\n".encode("utf-8", "surrogatepass"))
    for name in ("broken", "refused"):
        if name in answer:
            raise RenderError(printable(answer[name]), is_broken=name == "broken")
    return Rendered(**answer)


class _Worker:
    """The process; started on demand, and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._beyond_s = 0.0

    def ask(self, line: bytes) -> dict[str, Any]:
        with self._lock:
            try:
                found = self._exchange(line)
            except BrokenPipeError:  # it was ended since it was asked last
                found = self._exchange(line)
        more_s = found.pop("seconds", 0.0) - _SECONDS_EACH
        self._beyond_s = max(0.0, self._beyond_s + more_s)
        if self._beyond_s > _SECONDS_BEYOND:
            return {"refused": f"takes more than {_SECONDS_EACH:g} s for each of many examples"}
        return found

    def _exchange(self, line: bytes) -> dict[str, Any]:
        if self._process is None:
            with deaf_children():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            self._process = None
            process.wait()
            raise
        answer = process.stdout.readline()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        self._process = None
        if (status := process.wait()) == -signal.SIGPROF:
            return {"refused": f"takes more than {_SECONDS:g} s"}
        return {"refused": f"its process ended with status {status}"}


_worker = _Worker()
# A process that was forked must not use its parent's pipes, but begin again.
os.register_at_fork(after_in_child=lambda: _Worker.__init__(_worker))
