"""The runs of a comparison: which are asked for, how they are made and scored, what they left."""

from timelyfreeze.compare.runs.run import (
    FAILED,
    FINISHED,
    SETTINGS,
    UNFINISHED,
    FoundRuns,
    Points,
    Run,
    find_any,
    find_runs,
    flatten,
    read_run,
)

__all__ = [
    "FAILED", "FINISHED", "SETTINGS", "UNFINISHED", "FoundRuns", "Points", "Run", "find_any",
    "find_runs", "flatten", "read_run",
]  # fmt: skip
