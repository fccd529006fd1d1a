"""What the process of a reference does: read blocks and batches, answer with differences.

Messages are pickles, each after its length, so that one that cannot be read leaves the next alone.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from timelyfreeze.planning.background import end_with_parent
from timelyfreeze.policies import ReferenceSettings
from timelyfreeze.runtime.reference.model import ReferenceModel

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class Told:
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
    """Yield a :class:`Difference` or :class:`Told` for each batch, and what else is to be told."""
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
                    yield Told(f"its linear layers compute in float32: {model.note}", False)
            else:
                if model is None:
                    raise ValueError(why)
                yield model.difference(content)
        except Exception as error:  # whatever somebody's blocks raise
            yield Told(f"{type(error).__name__}: {error}", is_batch)


def _add_paths(paths: Mapping[str, Sequence[str]]) -> None:
    for top, folders in paths.items():
        package = importlib.import_module(top)
        missing = [folder for folder in folders if folder not in package.__path__]
        package.__path__ = [*package.__path__, *missing]
