"""The answer as one page of HTML: timelines before and after, the table, what it rests on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from timelyfreeze.planning import plan_from_ratios
from timelyfreeze.records.timeline import KIND_WORDS, Block, Timeline, predicted_timelines
from timelyfreeze.whatif.answers import ScheduleCases, measured_of, schedules_of
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.grid import Case, Grid, Split
from timelyfreeze.whatif.report import Report, best_of, first_sentence, pays, soonest_of


def render_page(
    report: Report, cases: Sequence[Case], file: BoundsFile, grid: Grid, layers: Split | None
) -> str:
    """Return the page on the plans of a grid; it needs no network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    soonest, (tables, _) = soonest_of(cases), schedules_of(file, grid, layers)
    asked = soonest.schedule, soonest.n_microbatches
    chosen = next(one for one in tables if (one.schedule, one.order.n_microbatches) == asked)
    measured = measured_of(file, grid, layers)
    split = None if measured else soonest.layers
    before = _timeline(measured or chosen, split, None)
    after = _timeline(chosen, soonest.layers, soonest.max_freeze_ratio if pays(soonest) else None)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        autoescape=select_autoescape(["html.j2"]), trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        first=first_sentence(measured, cases) if measured else report.title,
        best="\n".join(best_of(cases)),
        report=report,
        columns=[name for name in report.cells[0] if any(row[name] for row in report.cells)],
        timelines={(measured or chosen).schedule: before, f"{chosen.schedule}, best": after},
        longest_ms=max(before.batch_ms, after.batch_ms) or 1.0,
        about=_about,
    )


def _timeline(one: ScheduleCases, split: Split | None, cap: float | str | None) -> Timeline:
    """Return the batch under a cap's plan, or without freezing."""
    dag, bounds = one.dag, one.bounds_of(split)
    if cap is None:
        plan = plan_from_ratios(dag, bounds, np.zeros(len(dag.actions)))
        return predicted_timelines(dag, bounds, plan, one.grid.n_processors)[0]
    return predicted_timelines(dag, bounds, one.plan_of(bounds, cap), one.grid.n_processors)[1]


def _about(block: Block) -> str:
    action, frozen = block.action, ""
    if block.freeze_ratio:
        frozen = f", {block.freeze_ratio:.0%} frozen"
    return (
        f"{action}: {KIND_WORDS[action.kind]} of microbatch {action.microbatch} in stage "
        f"{action.stage}, {block.duration_ms:.2f} ms from {block.start_ms:.2f} ms{frozen}"
    )
