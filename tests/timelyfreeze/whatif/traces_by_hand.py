"""Traces written event by event, in microseconds, as PyTorch's profiler would."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
MAIN = 7  # thread that runs the schedule


def event(
    name: str, begin: float, took: float, category: str = "cpu_op", tid: int = MAIN, **more: Any
) -> Event:
    place = {"ph": "X", "cat": category, "pid": 1, "tid": tid}
    return {**place, "name": name, "ts": begin, "dur": took, **more}


def note(action: str, begin: float, took: float, category: str = "user_annotation") -> Event:
    return event(f"PP:{action}", begin, took, category)


def launch(number: int, begin: float, tid: int = MAIN) -> Event:
    more = {"args": {"correlation": number}}
    return event("cudaLaunchKernel", begin, 1.0, "cuda_runtime", tid, **more)


def kernel(number: int, begin: float, took: float, name: str = "gemm") -> Event:
    more = {"args": {"correlation": number, "stream": 7}}
    return event(name, begin, took, "kernel", 0, **more)


def write(path: Path, events: Iterable[Event]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(events)}))
    return path


def bare(folder: Path, rows: Sequence[str], took_ms: dict[str, float]) -> list[Path]:
    """Traces of annotations alone, one behind the other; ``took_ms`` by stage and kind."""
    paths = []
    for rank, row in enumerate(rows):
        now, events = 1000.0, []
        for word in row.split():
            took = 1e3 * took_ms[word.rstrip("0123456789")]
            events.append(note(word, now, took))
            now += took + 1.0
        paths.append(write(folder / f"trace_rank{rank}.json", events))
    return paths
