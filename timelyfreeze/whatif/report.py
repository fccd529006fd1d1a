"""Plans of a grid and frozen fronts as a table for the terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from timelyfreeze.files import spreadsheet_cell
from timelyfreeze.policies import LORA, NONE, PLANNED
from timelyfreeze.timing import holds_for, within
from timelyfreeze.whatif.bounds_file import BoundsFile, recall
from timelyfreeze.whatif.fronts import FrontCase
from timelyfreeze.whatif.grid import Answer, Case, Grid, render_cap, render_split
from timelyfreeze.whatif.partition import PARTITIONS

_LEGEND = (
    "step, frozen, best without freezing: milliseconds of a step without freezing, under the plan, "
    "and of the best split without freezing; time to a loss: over that without freezing, estimated "
    "for tensors frozen at random; kappa: frozen over step, and as Eq. 50 has it from r_max alone; "
    "by stage: mean freeze ratios, a stage at 1 being frozen for good; "
    "upper bound: the gain with everything frozen; bubble: "
    "idle fraction of the devices, without and with freezing"
)
# With more stages a terminal is too narrow for a value of each; files have them all.
_MAX_STAGES_SHOWN = 8
# What a grid asks for, which each case has.
_OF_CASES = ("schedules", "caps", "microbatches", "splits", "time_limit_s")
# What follows from the other values of a case.
_DERIVED = (
    "gain", "time_to_loss", "kappa", "kappa_of_cap", "upper_bound_gain", "gain_over_best_unfrozen",
    "frozen_microbatch_ms", "tokens_per_second_unfrozen",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was asked and what comes of it, as a table for the terminal, as JSON and as CSV."""

    title: str
    asked: Mapping[str, Any]  # what JSON has besides the cases and notes
    cells: Sequence[Mapping[str, str]]  # of each case, by the titles of columns
    rows: Sequence[Mapping[str, Any]]  # each case as plain data; None for what is not known
    below: Sequence[str]  # lines below the table
    notes: Sequence[str]

    def text(self) -> str:
        """Return the table under its title, with notes below; empty columns are left out."""
        columns = [name for name in self.cells[0] if any(row[name] for row in self.cells)]
        table = [columns, *([row[name] for name in columns] for row in self.cells)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        table.insert(1, ["-" * width for width in widths])
        lines = ["  ".join(map(str.rjust, row, widths)) for row in table]
        return "\n".join([self.title, "", *lines, "", *self.below, *self.notes])

    def json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**self.asked, "cases": self.rows, "notes": self.notes}, indent=2) + "\n"

    def csv(self) -> str:
        """Return the cases as CSV; lists are joined by spaces, what is not known is empty."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.rows[0])
        for row in self.rows:
            writer.writerow(
                " ".join(map(str, value)) if isinstance(value, tuple) else spreadsheet_cell(value)
                for value in row.values()
            )
        return buffer.getvalue()


def plan_report(answer: Answer[Case], file: BoundsFile, grid: Grid) -> Report:
    """Return the report on the plans of a grid."""
    asked = {k: v for k, v in asdict(grid).items() if k not in _OF_CASES}
    recalled = recall(file)
    measured_ms, from_stages_ms = recalled or (None, None)
    return Report(
        title_of(file, grid, recalled),
        {
            "bounds": str(file.path),
            **asked,
            "measured_batch_ms": measured_ms,
            "measured_batch_ms_from_stages": from_stages_ms,
            "interval_factor": file.table.interval_factor,
            "unit": file.notes.unit,
        },
        [cells_of(case, file.notes.unit or "tokens") for case in answer.cases],
        [asdict(c) | {name: getattr(c, name) for name in _DERIVED} for c in answer.cases],
        [_LEGEND, *best_of(answer.cases)],
        answer.notes,
    )


def title_of(file: BoundsFile, grid: Grid, recalled: tuple[float, float] | None) -> str:
    """Return what the metrics are made from, and how well times of stages stand for it."""
    lines = [
        f"{file.path}: {file.n_stages} stages, {file.n_microbatches} microbatches measured; "
        f"planning for {grid.n_ranks} ranks"
    ]
    if recalled is not None:
        measured_ms, from_stages_ms = recalled
        lines.append(
            f"the measured pipeline without freezing: {measured_ms:.1f} ms a batch from its "
            f"actions, {from_stages_ms:.1f} ms ({from_stages_ms / measured_ms - 1.0:+.1%}) from "
            "the times of its stages"
        )
    measured = "" if file.table.interval_factor is None else ", as those of the measured run"
    lines.append(
        f"predictions hold for {holds_for(grid.n_ranks, grid.n_processors)}; "
        f"{within(file.table.interval_factor)}{measured}"
    )
    return "\n".join(lines)


def best_of(cases: Sequence[Case]) -> list[str]:
    """Name the case with the shortest microbatches, that soonest at a loss, and adapters."""
    shortest = min(cases, key=lambda case: case.frozen_microbatch_ms)
    soonest = min(cases, key=lambda case: case.per_microbatch(case.step_ms) * _least(case))
    unfrozen_ms = soonest.per_microbatch(soonest.step_ms)
    text = f"{_where(soonest)}, without freezing: {unfrozen_ms:.2f} ms"
    keys = {"parallelism.pipeline_parallel_schedule": soonest.schedule, "freezing.method": NONE}
    if _least(soonest) < 1.0:
        text = f"{_frozen(soonest)}, times {soonest.steps_factor:.2f} steps"
        cap = render_cap(soonest.max_freeze_ratio)
        keys |= {"freezing.method": PLANNED, "freezing.max_freeze_ratio": cap}
    if soonest.split in PARTITIONS:
        keys["parallelism.partition"] = soonest.split
    adapted = min(cases, key=lambda case: case.per_microbatch(case.all_frozen_step_ms))
    adapted_ms = adapted.per_microbatch(adapted.all_frozen_step_ms)
    return [
        f"shortest for each microbatch: {_frozen(shortest)}",
        f"soonest at a loss: {text}",
        "its keys: " + " ".join(f"--{key}={value}" for key, value in keys.items()),
        f"adapters (--freezing.method={LORA}) leave out the gradients of all weights: "
        f"{_where(adapted)}, {adapted_ms:.2f} ms",
    ]


def _least(case: Case) -> float:
    """Return the time to a loss over that without freezing, of the better of the two."""
    return 1.0 if case.time_to_loss is None else min(1.0, case.time_to_loss)


def _frozen(case: Case) -> str:
    cap = render_cap(case.max_freeze_ratio)
    return f"{_where(case)}, r_max {cap}: {case.frozen_microbatch_ms:.2f} ms"


def _where(case: Case) -> str:
    return f"{case.schedule}, {case.n_microbatches} microbatches, split {case.split}"


def cells_of(case: Case, unit: str) -> dict[str, str]:
    """Return what the table has of a case; throughput counts ``unit``."""
    best_layers = _each(case.best_unfrozen_layers or (), "d", ",")
    best_ms, over_best = case.best_unfrozen_step_ms, case.gain_over_best_unfrozen
    return {
        "schedule": case.schedule,
        "microbatches": str(case.n_microbatches),
        "split": case.split,
        "layers": "" if case.layers is None else _each(case.layers, "d", ","),
        "r_max": render_cap(case.max_freeze_ratio),
        "step": f"{case.step_ms:.1f}",
        "frozen": f"{case.frozen_step_ms:.1f}",
        "gain": f"{case.gain:+.1%}",
        "kappa": "" if case.kappa is None else f"{case.kappa:.3f}",
        "by Eq. 50": "" if case.kappa_of_cap is None else f"{case.kappa_of_cap:.3f}",
        "time to a loss": "" if case.time_to_loss is None else f"{case.time_to_loss:.2f}",
        "upper bound": f"{case.upper_bound_gain:+.1%}",
        "ratio": f"{case.mean_ratio:.2f}",
        "by stage": _each(case.stage_ratios, ".2f", " "),
        "bubble": f"{case.bubble:.1%} {case.frozen_bubble:.1%}",
        f"{unit}/s": "" if case.tokens_per_second is None else f"{case.tokens_per_second:.0f}",
        "best without freezing": "" if best_ms is None else f"{best_ms:.1f} {best_layers}",
        "over best": "" if over_best is None else f"{over_best:+.1%}",
    }


def _each(values: Sequence[float], form: str, between: str) -> str:
    """Return a value for each stage, or their range where a row is too narrow for that."""
    if len(values) <= _MAX_STAGES_SHOWN:
        return between.join(format(value, form) for value in values)
    return f"{min(values):{form}} to {max(values):{form}}"


_FRONT_LEGEND = (
    "milliseconds of a batch, and over that with nothing frozen. frozen: the first layers have no "
    "backward, and nothing else is done; the columns behind it each add one thing to that. cache: "
    "the batch begins behind the front; reading is not in it. re-split: the fastest split found "
    "for the frozen model. run-ahead: stages wholly in front work on the next batch. shrink: "
    "replicas x ranks of each, for the same rows; gradients that replicas send each other are not "
    "in it, but in exchange, which needs --link-gb-per-s"
)


def front_report(answer: Answer[FrontCase], file: BoundsFile, grid: Grid) -> Report:
    """Return the report on frozen fronts."""
    asked = ("n_ranks", "n_processors", "p2p_overhead_ms", "link_gb_per_s")
    return Report(
        title_of(file, grid, recall(file)),
        {"bounds": str(file.path), **{key: getattr(grid, key) for key in asked}},
        [_cells(case) for case in answer.cases],
        [_plain(case) for case in answer.cases],
        [_FRONT_LEGEND],
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
