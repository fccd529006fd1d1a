"""The answer as one page of HTML: timelines before and after, the table, what it rests on."""

from collections.abc import Sequence
from pathlib import Path

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
    before, _ = _timelines(*((measured, None) if measured else (chosen, soonest.layers)), 0.0)
    cap = soonest.max_freeze_ratio if pays(soonest) else 0.0
    unfrozen, frozen = _timelines(chosen, soonest.layers, cap)
    after = frozen if pays(soonest) else unfrozen
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


def _timelines(
    one: ScheduleCases, split: Split | None, cap: float | str
) -> tuple[Timeline, Timeline]:
    """Return the batch without freezing, and under a cap's plan."""
    bounds = one.bounds_of(split)
    return predicted_timelines(one.dag, bounds, one.plan_of(bounds, cap), one.grid.n_processors)


def _about(block: Block) -> str:
    action, frozen = block.action, ""
    if block.freeze_ratio:
        frozen = f", {block.freeze_ratio:.0%} frozen"
    return (
        f"{action}: {KIND_WORDS[action.kind]} of microbatch {action.microbatch} in stage "
        f"{action.stage}, {block.duration_ms:.2f} ms from {block.start_ms:.2f} ms{frozen}"
    )
