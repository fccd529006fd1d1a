"""The report on frozen fronts: what `timelyfreeze plan --frozen-layers` prints and writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from timelyfreeze.whatif.bounds_file import BoundsFile, recall
from timelyfreeze.whatif.fronts.cases import FrontAnswer, FrontCase
from timelyfreeze.whatif.grid import Grid, render_split
from timelyfreeze.whatif.report import Report, title_of

_LEGEND = (
    "milliseconds of a batch, and over that with nothing frozen. frozen: the first layers have no "
    "backward, and nothing else is done; the columns behind it each add one thing to that. cache: "
    "the batch begins behind the front; reading is not in it. re-split: the fastest split found "
    "for the frozen model. run-ahead: stages wholly in front work on the next batch. shrink: "
    "replicas x ranks of each, for the same rows; gradients that replicas send each other are not "
    "in it, but in exchange, which needs --link-gb-per-s"
)


def front_report(answer: FrontAnswer, file: BoundsFile, grid: Grid) -> Report:
    """Return the report on frozen fronts."""
    asked = ("n_ranks", "n_processors", "p2p_overhead_ms", "link_gb_per_s")
    return Report(
        title_of(file, grid, recall(file, file.notes.processors)),
        {"bounds": str(file.path), **{key: getattr(grid, key) for key in asked}},
        [_cells(case) for case in answer.cases],
        [_plain(case) for case in answer.cases],
        [_LEGEND],
        answer.notes,
    )


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
    plan = None if shrunk is None else shrunk.plan
    return plain | {
        "shrunk_partition": shrunk and shrunk.partition,
        "shrunk_ranks": plan and plan.n_ranks,
        "shrunk_replicas": plan and plan.n_replicas,
        "shrunk_microbatches": plan and plan.n_microbatches,
        "shrunk_layers": plan and plan.split,
        "shrunk_ms": shrunk and shrunk.batch_ms,
        "exchange_ms": shrunk and shrunk.exchange_ms,
    }
