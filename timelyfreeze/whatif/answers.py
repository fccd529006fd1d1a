"""What if: every case of a grid, worked out from one bounds file without a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from timelyfreeze.schedule import ScheduleOrder, build_dag, gpipe_order, one_f_one_b_order
from timelyfreeze.whatif.bounds_file import ORDER_FILE, BoundsFile
from timelyfreeze.whatif.grid import Answer, Grid, Split, render_split
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel, block_times, layer_model
from timelyfreeze.whatif.schedule_cases import ScheduleCases, first_line
from timelyfreeze.whatif.times import StageTimes

T = TypeVar("T")
# The order of every other schedule is torch's, whose import takes longer than planning.
_OUR_OWN = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}


def answer(file: BoundsFile, grid: Grid, layers: Split | None = None) -> Answer:
    """Work out every case of a grid.

    Cases that cannot be built are left out, with a note each. ``layers`` are those of each measured
    stage, if the file does not say.

    Raises:
        ValueError: If no case can be built, or ``layers`` contradicts the file.
    """
    tables, notes = schedules_of(file, grid, layers)
    return Answer(sorted_out((one for table in tables for one in table.cases()), notes), (*notes,))


def sorted_out(found: Iterable[T | str], notes: list[str]) -> tuple[T, ...]:
    """Return the cases among what was ``found``; notes go to ``notes``, each once.

    Raises:
        ValueError: If there is no case.
    """
    cases: list[T] = []
    for one in found:
        if not isinstance(one, str):
            cases.append(one)
        elif one not in notes:
            notes.append(one)
    if not cases:
        raise ValueError("nothing can be planned:\n" + "\n".join(f"  - {note}" for note in notes))
    return tuple(cases)


def schedules_of(
    file: BoundsFile, grid: Grid, layers: Split | None
) -> tuple[list[ScheduleCases], list[str]]:
    """Return the schedules of a grid, each with each number of microbatches, and notes.

    Raises:
        ValueError: If ``layers`` contradicts the file.
    """
    stages, known = file.stage_times(), file.notes.layers
    if layers is not None and len(layers) != len(stages):
        raise ValueError(
            f"--layers has {len(layers)} stages ({render_split(layers)}); times are those of "
            f"{len(stages)}"
        )
    if layers is not None and known not in (None, layers):
        raise ValueError(
            f"--layers is {render_split(layers)}; {file.path.name} says that stages have "
            f"{render_split(known or ())} layers"
        )
    model, notes = _model(file, stages, layers or known)
    notes = [*_basis(file), *_messages(file, grid), *notes]
    tables: list[ScheduleCases] = []
    for schedule, n_microbatches in itertools.product(grid.schedules, grid.microbatches):
        try:
            order = order_of(schedule, grid.n_ranks, len(stages), n_microbatches)
            dag = build_dag(order)
        except ValueError as error:
            notes.append(f"left out {schedule}, {n_microbatches} microbatches: {first_line(error)}")
            continue
        tables.append(
            ScheduleCases(file, grid, schedule, n_microbatches, order, dag, stages, model)
        )
    return tables, notes


def _model(
    file: BoundsFile, stages: Sequence[StageTimes], layers: Split | None
) -> tuple[LayerModel | BlockTimes | None, list[str]]:
    """Return the overheads at which layers move, or None and why they are not known."""
    if layers is None:
        return None, [
            f"{file.path.name} does not say how many layers a stage has, so only the measured "
            "split is planned for; tell with --layers"
        ]
    sizes = file.notes.parameters
    if sizes is not None and not sizes.are_alike:
        return block_times(stages, layers), []
    try:
        return layer_model(stages, layers, file.notes.layer, file.notes.fixed), []
    except ValueError as error:
        return None, [f"only the measured split is planned for: {error}"]


def _basis(file: BoundsFile) -> Iterator[str]:
    """Say what was not measured."""
    if file.derived_kinds:
        yield (
            f"times of {file.derived_kinds} are derived from those of the other backward actions, "
            "taking I to last as long as B with everything frozen and W what that saves. Split "
            "backwards can take a good deal longer than full ones; a profile measures both"
        )
    sizes = file.notes.parameters
    if sizes is not None and not sizes.are_alike:
        yield (
            "layers differ: one takes the time of the stage that it was measured in over that "
            "stage's layers"
        )
    elif file.notes.layer is None:
        yield (
            "a layer's time is that of the stages in the middle over their layers; a profile "
            "measures it"
        )


def _messages(file: BoundsFile, grid: Grid) -> Iterator[str]:
    """Say what messages between ranks cost in the table, and how much of that was measured."""
    overhead_ms, links = file.links.p2p_overhead_ms, file.links.p2p_latency_ms
    if not links and overhead_ms + grid.p2p_overhead_ms == 0.0:
        yield (
            "messages between ranks cost nothing in these metrics: no link was timed, as in a "
            "profile, which sends none; tell an overhead with --p2p-overhead-ms"
        )
        return
    latency = "no link was timed"
    if links:
        low, high = min(links.values()), max(links.values())
        latency = (
            f"its latency is {low:.3g} to {high:.3g} ms, as timed; other links have the median"
        )
    added = f" and {grid.p2p_overhead_ms:.3g} ms as told" if grid.p2p_overhead_ms else ""
    yield f"a message costs {overhead_ms:.3g} ms as measured{added}; {latency}"
    if file.keeps_overhead:
        yield (
            f"no {ORDER_FILE} lies beside {file.path.name}, so the measured overhead of messages "
            "stays in the times of the stages that had it"
        )


def order_of(schedule: str, n_ranks: int, n_measured: int, n_microbatches: int) -> ScheduleOrder:
    """Return the order in which the ranks of a schedule work.

    It has as many stages as were measured, where the schedule can have so many.

    Raises:
        ValueError: If the schedule is unknown, one of a CSV file, or cannot be built from these
            numbers.
    """
    own = _OUR_OWN.get(schedule.lower())
    if own is not None:
        return own(n_ranks, n_microbatches)
    from timelyfreeze.runtime import (
        known_schedules,
        named_order,
        places_stages_in_v,
        stages_per_rank,
    )

    named = [name for name in known_schedules() if not name.startswith("PipelineSchedule")]
    if schedule.lower() not in (name.lower() for name in named):
        raise ValueError(f"{schedule!r} is no schedule; known: {', '.join(named)}")
    per_rank = stages_per_rank(schedule) or 1
    if not (places_stages_in_v(schedule) or n_measured % n_ranks or n_measured < 2 * n_ranks):
        per_rank = n_measured // n_ranks
    return named_order(schedule, n_ranks, n_microbatches, stages_per_rank=per_rank)
