"""The cases of frozen fronts as a table for the terminal, as JSON and as CSV."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.fronts.cases import FrontAnswer, FrontCase
from timelyfreeze.whatif.grid import Grid, render_split
from timelyfreeze.whatif.report import aligned, csv_of

_LEGEND = (
    "milliseconds of a batch, and over that with nothing frozen. frozen: the first layers have no "
    "backward, and nothing else is done; the columns behind it each add one thing to that. cache: "
    "the batch begins behind the front; reading is not in it. re-split: the fastest split found "
    "for the frozen model. run-ahead: stages wholly in front work on the next batch. shrink: "
    "replicas x ranks of each, for the same rows; gradients that replicas send each other are not "
    "in it, but in exchange, which needs --link-gb-per-s"
)


def render_fronts(answer: FrontAnswer, title: str) -> str:
    """Return the table under ``title``, with notes below."""
    lines = aligned([_cells(case) for case in answer.cases])
    return "\n".join([title, "", *lines, "", _LEGEND, *answer.notes])


def _cells(case: FrontCase) -> dict[str, str]:
    def cell(batch_ms: float | None) -> str:
        if batch_ms is None:
            return ""
        over = f" {batch_ms / case.unfrozen_ms:.2f}" if case.unfrozen_ms > 0.0 else ""
        return f"{batch_ms:.1f}{over}"

    shrunk = case.shrunk
    return {
        "schedule": case.schedule,
        "microbatches": str(case.n_microbatches),
        "split": case.split,
        "layers": render_split(case.layers),
        "frozen layers": str(case.n_frozen),
        "unfrozen": f"{case.unfrozen_ms:.1f}",
        "frozen": cell(case.frozen_ms),
        "cache": cell(case.cached_ms),
        "re-split": cell(case.resplit_ms),
        "as": render_split(case.resplit_layers),
        "run-ahead": cell(case.run_ahead_ms),
        "shrink": cell(None if shrunk is None else shrunk.batch_ms),
        "to": "" if shrunk is None else f"{shrunk.plan.n_replicas} x {shrunk.plan.n_ranks}",
        "of": "" if shrunk is None else render_split(shrunk.plan.split),
        "exchange": cell(None if shrunk is None else shrunk.exchange_ms),
    }


def _plain(case: FrontCase) -> dict[str, Any]:
    """Return a case as plain data; None stands for what is not known."""
    plain = {key: value for key, value in asdict(case).items() if key != "shrunk"}
    shrunk = case.shrunk
    return plain | {
        "shrunk_partition": None if shrunk is None else shrunk.partition,
        "shrunk_ranks": None if shrunk is None else shrunk.plan.n_ranks,
        "shrunk_replicas": None if shrunk is None else shrunk.plan.n_replicas,
        "shrunk_microbatches": None if shrunk is None else shrunk.plan.n_microbatches,
        "shrunk_layers": None if shrunk is None else shrunk.plan.split,
        "shrunk_ms": None if shrunk is None else shrunk.batch_ms,
        "exchange_ms": None if shrunk is None else shrunk.exchange_ms,
    }


def fronts_to_json(answer: FrontAnswer, file: BoundsFile, grid: Grid) -> str:
    """Return everything as JSON: what was asked, the cases, and the notes."""
    plain = {
        "bounds": str(file.path),
        "n_ranks": grid.n_ranks,
        "n_processors": grid.n_processors,
        "p2p_overhead_ms": grid.p2p_overhead_ms,
        "link_gb_per_s": grid.link_gb_per_s,
        "cases": [_plain(case) for case in answer.cases],
        "notes": answer.notes,
    }
    return json.dumps(plain, indent=2) + "\n"


def fronts_to_csv(answer: FrontAnswer) -> str:
    """Return the cases as CSV; lists are joined by spaces, what is not known is empty."""
    return csv_of([_plain(case) for case in answer.cases])
