"""Run folders written by hand, and what curves of a plot are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from timelyfreeze.planning.plan import plan_from_ratios, plan_to_json
from timelyfreeze.records.timeline import (
    MEASURED,
    Timeline,
    predicted_timelines,
    timeline_file,
    timeline_to_json,
)
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ScheduleOrder, one_f_one_b_order, order_to_csv
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.bounds import uniform_bounds
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text

ORDER = one_f_one_b_order(2, 4)


def write_settings(folder: Path, csv: str = "") -> None:
    settings = {
        "parallelism": {
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": csv,
        },
        "model": {"name": "llama3", "flavor": "8M"},
        "freezing": {"method": "timelyfreeze"},
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def write_plan(
    folder: Path, order: ScheduleOrder = ORDER, processors: float | None = None
) -> tuple[Timeline, Timeline]:
    """Write bounds, schedule and a plan, and return what it predicts."""
    dag = build_dag(order)
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(dag, bounds, 0.5 * dag.freezable, n_processors=processors)
    notes = PipelineMetadata(ranks=order.n_ranks, processors=processors)
    (folder / "schedule.csv").write_text(order_to_csv(order))
    (folder / "bounds.json").write_text(bounds_file_text(dag, bounds, notes))
    (folder / "plan.json").write_text(plan_to_json(plan))
    return predicted_timelines(dag, bounds, plan, processors)


def write_measured(
    folder: Path, *phases: Phase, order: ScheduleOrder = ORDER, first_step: int = 1
) -> None:
    """Write timelines as if they had been measured in these phases."""
    dag = build_dag(order)
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(dag, bounds, 0.5 * dag.freezable)
    unfrozen, frozen = predicted_timelines(dag, bounds, plan)
    for step, phase in enumerate(phases, first_step):
        like = frozen if phase in (Phase.STABLE, Phase.LOWER_BOUND) else unfrozen
        file = timeline_file(folder, phase)
        file.parent.mkdir(exist_ok=True)
        file.write_text(timeline_to_json(replace(like, origin=MEASURED, phase=phase, step=step)))


def lines(axes: Axes) -> dict[str, list[list[tuple[float, float]]]]:
    """Curves by label, their parts one after the other; pale ones and marks have none."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    label = ""
    for line in axes.get_lines():
        if not str(line.get_label()).startswith("_"):
            label = str(line.get_label())
        points = np.asarray(line.get_xydata(), float)
        if len(points) and label:
            found.setdefault(label, []).append([tuple(p) for p in points.tolist()])
    return found
