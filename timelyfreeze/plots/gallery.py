"""Every plot and trace of a run folder. A new plot is a line here.

Measured batches are in ``timelines/measured_<phase>.json``; predictions follow from
``bounds.json``, ``plan.json`` and ``schedule.csv``.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from timelyfreeze.files import Number, Table, parse_json, read_as
from timelyfreeze.planning import plan_from_json
from timelyfreeze.plots import curves, response
from timelyfreeze.plots.timeline import timeline_figure
from timelyfreeze.records import tables
from timelyfreeze.records import timeline as timelines
from timelyfreeze.records.timeline import Timeline
from timelyfreeze.schedule import build_dag, order_from_csv
from timelyfreeze.settings import Phase
from timelyfreeze.timing import bounds_from_json
from timelyfreeze.whatif.bounds_file import read_bounds_file

Row = TypeVar("Row")
Value = TypeVar("Value")
Draw = Callable[[Path], Figure | str]

_PLAN_FILES = ("bounds.json", "plan.json", "schedule.csv")
_SETTINGS = "settings.json"
_MOST_CHARACTERS = 80
_OBJECT = Mapping[str, Any]
_SCHEDULE = "pipeline_parallel_schedule"


@dataclass(frozen=True)
class RunNames:
    """Names of a run's parts in its settings."""

    method: str  # its freezing method
    schedule: str  # its schedule; of one from a CSV file the file's name
    n_ranks: int  # ranks of its pipeline
    model: str  # its model
    is_emulated: bool  # whether one process ran all ranks
    unit: str  # what throughput counts: tokens, or images where the data set is pictures


def read_names(run_folder: Path) -> RunNames | None:
    """Return the names in a run's settings; None without settings, as beside a bare plan."""
    path = run_folder / _SETTINGS
    if not path.exists():
        return None
    try:
        settings = read_as(_OBJECT, parse_json(path.read_bytes()), "the whole")

        def said(section: str, key: str, hint: Any = str, default: Any = None) -> Any:
            # Older runs have fewer sections.
            values = read_as(_OBJECT, settings.get(section, {}), section)
            value = read_as(hint, values.get(key, default), f"{section}.{key}")
            is_long = hint is str and len(value) > _MOST_CHARACTERS
            return f"{value[:_MOST_CHARACTERS]}..." if is_long else value

        csv = said("parallelism", f"{_SCHEDULE}_csv", Any)
        schedule = said("parallelism", f"{_SCHEDULE}_csv" if csv else _SCHEDULE)
        return RunNames(
            method=said("freezing", "method"),
            schedule=Path(schedule).name if csv else schedule,
            n_ranks=said("parallelism", "pipeline_parallel_degree", Number, 1),
            model=f"{said('model', 'name')} {said('model', 'flavor')}",
            is_emulated=said("emulation", "enable", Any) is True,
            unit="images" if said("training", "dataset", Any) == "images" else "tokens",
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no run's settings: {error}") from error


def _names(run_folder: Path) -> RunNames | None:
    try:
        return read_names(run_folder)
    except ValueError:  # told once, by who draws all plots
        return None


def run_title(run_folder: Path, subject: str) -> str:
    """Return a plot's title: its subject, and the run, or its folder without settings."""
    if (names := _names(run_folder)) is None:
        return as_drawn(f"{subject}\n{run_folder.resolve().name}")
    words = ["without freezing" if names.method == "none" else names.method]
    if names.n_ranks > 1:
        words.append(f"{names.schedule} over {names.n_ranks} ranks")
    if names.is_emulated:
        words.append("emulated")
    return as_drawn(f"{subject}\n{', '.join([*words, names.model])}")


def as_drawn(text: str) -> str:
    """Return a text drawn literally: two $ would be read as maths."""
    return text.replace("$", r"\$")


def draw_measured(run_folder: Path) -> Figure | str:
    """Draw a measured batch without freezing above those with; or give the reason."""
    unfrozen, frozen = (
        measured_batch(run_folder, phases) for phases in (timelines.UNFROZEN, timelines.FROZEN)
    )
    names: list[str] = []
    # A run that was stopped early has only one of them.
    shown = [one for one in (unfrozen, frozen) if one is not None] or measured(run_folder)
    if moved := _of_pipelines(run_folder):
        batches = ({} if unfrozen is None else {"Without freezing": unfrozen}) | moved
        names, shown = [*batches], [*batches.values()]
    if shown:
        return timeline_figure(shown, batches_title(run_folder, shown[0]), names)
    return (
        f"{run_folder / 'timelines'} has no measured_*.json: the run has no pipeline or no "
        "freezing, or ended before a phase was measured"
    )


def draw_predicted(run_folder: Path) -> Figure | str:
    """Draw the predicted batch, without freezing above with; or give the reason."""
    if shown := predicted(run_folder):
        return timeline_figure(shown, batches_title(run_folder, shown[0]))
    missing = " and ".join(_missing_plan_files(run_folder))
    return f"{missing} missing: the run's method makes no plan, or none was made yet"


def _of_pipelines(run_folder: Path) -> dict[str, Timeline]:
    """Return a frozen batch by name for each pipeline of an elastic run.

    Of pipelines side by side a single one counts. Empty for a run without moves; a pipeline soon
    left may lack measurements.
    """
    moves, names = _rows(tables.MOVES, run_folder), ["In the first pipeline"]
    if not any(move.split for move in moves):
        return {}
    for move in moves:
        pipelines = "a pipeline" if move.replicas == 1 else f"{move.replicas} pipelines"
        names.append(
            f"From step {move.step}, {pipelines} of {move.ranks} ranks, layers {move.split}"
        )
    # Files have numbers by plan where there are plans, so that steps tell the pipeline.
    last = timelines.timeline_file(run_folder, Phase.STABLE)
    files = last.parent.glob(f"{last.stem}*{last.suffix}")
    found = [_of(file, timelines.timeline_from_json) for file in files]
    firsts = [move.step for move in moves]
    by_step = sorted(found, key=lambda timeline: timeline.step or 0)
    return {names[bisect_right(firsts, each.step or 0)]: each for each in by_step}


def measured_batch(run_folder: Path, phases: Sequence[Phase]) -> Timeline | None:
    """Return the measured batch of the first of ``phases`` with data."""
    files = (timelines.timeline_file(run_folder, phase) for phase in phases)
    file = next((file for file in files if file.exists()), None)
    return None if file is None else _of(file, timelines.timeline_from_json)


def predicted_batch(run_folder: Path, phases: Sequence[Phase]) -> Timeline | None:
    """Return the batch predicted by a run's plan in ``phases``; None without a plan."""
    return next((one for one in predicted(run_folder) if one.phase in phases), None)


def batches_title(run_folder: Path, timeline: Timeline) -> str:
    """Return a run's title above plots: schedule, size and model, if known."""
    order = timeline.order
    size = f"{order.n_ranks} ranks, {order.n_microbatches} microbatches"
    names = _names(run_folder)
    if names is None:  # bounds and plan of another origin, such as the profile
        return size
    return as_drawn(f"{names.schedule}, {size}, {names.model}")


def measured(run_folder: Path) -> Sequence[Timeline]:
    """Return all measured batches, in the order of phases."""
    files = (timelines.timeline_file(run_folder, phase) for phase in Phase)
    return [_of(file, timelines.timeline_from_json) for file in files if file.exists()]


def _missing_plan_files(run_folder: Path) -> list[str]:
    return [name for name in _PLAN_FILES if not (run_folder / name).exists()]


def predicted(run_folder: Path) -> Sequence[Timeline]:
    """Return the batch without freezing and the planned; empty without a plan."""
    if _missing_plan_files(run_folder):
        return ()
    files = {name: run_folder / name for name in _PLAN_FILES}
    notes = read_bounds_file(files["bounds.json"]).metadata
    dag = _of(files["schedule.csv"], lambda text: build_dag(order_from_csv(text)))
    bounds = _of(files["bounds.json"], lambda text: bounds_from_json(dag, text))

    def read(text: str) -> Sequence[Timeline]:
        plan = plan_from_json(text)
        return timelines.predicted_timelines(dag, bounds, plan, notes.processors)

    played = _of(files["plan.json"], read)
    if not all(math.isfinite(timeline.batch_ms) for timeline in played):
        raise ValueError(f"{files['bounds.json']}: its times together are beyond all numbers")
    return played


def _of(file: Path, read: Callable[[str], Value]) -> Value:
    """Return the result of ``read`` on a file; a ValueError names the file."""
    try:
        return read(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _rows(table: Table[Row], run_folder: Path) -> list[Row]:
    return table.read(run_folder) if (run_folder / table.name).exists() else []


def _draws(
    figure: Callable[[list[Row], str], Figure],
    subject: str,
    table: Table[Row],
    reason: str,
    is_known: Callable[[Row], Any] = lambda row: True,
) -> Draw:
    """Return a drawer of a file's rows, or the reason if there are no known rows."""

    def draw(run_folder: Path) -> Figure | str:
        if not any(map(is_known, rows := _rows(table, run_folder))):
            return f"{table.name} has {reason}"
        return figure(rows, run_title(run_folder, subject))

    return draw


def draw_curves(run_folder: Path) -> Figure | str:
    """Draw freeze ratio and throughput over steps; or say why not."""
    names = _names(run_folder)
    n_emulated = names.n_ranks if names is not None and names.is_emulated else 1
    unit = "tokens" if names is None else names.unit
    figure = partial(curves.curves_figure, n_emulated=n_emulated, unit=unit)
    reason = "no step: the run ended before the first step was logged"
    return _draws(figure, "Freeze ratio and throughput", tables.STEPS, reason)(run_folder)


def draw_front(run_folder: Path) -> Figure | str:
    """Draw the frozen front over steps, and plasticity where there is any; or say why not."""
    if not (run_folder / tables.FRONT.name).exists():
        return f"{tables.FRONT.name} has no step: the run's method freezes no front"
    rows = tables.FRONT.read(run_folder)
    evaluations = _rows(tables.PLASTICITY, run_folder)
    if not rows or not (evaluations or any(row.frozen_layers for row in rows)):
        return f"{tables.FRONT.name} has no front: nothing was frozen yet"
    moves = _rows(tables.MOVES, run_folder)
    return curves.front_figure(rows, evaluations, run_title(run_folder, "Frozen front"), moves)


def draw_response(run_folder: Path) -> Figure | str:
    """Draw backward times against frozen fractions; or say why not."""
    with suppress(FileNotFoundError):
        if rows := tables.read_responses(run_folder):
            title = run_title(run_folder, "Time of backwards, by what they freeze")
            return response.response_figure(rows, title)
    return f"{tables.RESPONSES.name} has no backward: the run froze nothing, or has not ended"


draw_convergence = _draws(
    curves.convergence_figure, "What a step costs and updates", tables.STEPS,
    "neither kappa nor p_eff: nothing was frozen, or too few steps",
    lambda row: row.kappa is not None or row.p_eff is not None,
)  # fmt: skip
draw_loss = _draws(curves.loss_figure, "Losses", tables.LOSSES, "no loss: none was logged")
draw_histogram = _draws(
    response.histogram_figure, "How often tensors were frozen", tables.COUNTS,
    "no backward: freezing has not begun, or the run has not ended", lambda row: row.backwards,
)  # fmt: skip

# Name of the files, and a function of the run folder: the plot, or why there is none. A file
# that is there and cannot be read is a ValueError. What stands before the first "_" groups plots
# in TensorBoard.
PLOTS: tuple[tuple[str, Draw], ...] = (
    ("timeline_measured", draw_measured),
    ("timeline_predicted", draw_predicted),
    ("curves", draw_curves),
    ("front", draw_front),
    ("loss", draw_loss),
    ("convergence", draw_convergence),
    ("response", draw_response),
    ("histogram", draw_histogram),
)

# Likewise; where there are no batches, the plot of the same data says why.
TRACES: tuple[tuple[str, Callable[[Path], Sequence[Timeline]]], ...] = (
    ("trace_measured", measured),
    ("trace_predicted", predicted),
)
