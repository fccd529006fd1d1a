"""Plans of a grid and frozen fronts as a table for the terminal, as JSON and as CSV."""

import csv
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from string import Formatter
from typing import Any

from timelyfreeze.files import spreadsheet_cell
from timelyfreeze.policies import LORA, NONE, PLANNED
from timelyfreeze.timing import holds_for, within
from timelyfreeze.whatif.answers import TOLD, ScheduleCases
from timelyfreeze.whatif.bounds_file import BoundsFile, recall
from timelyfreeze.whatif.fronts import FrontCase
from timelyfreeze.whatif.grid import DEFAULT_SPLIT, Answer, Case, Grid, render_cap, render_split
from timelyfreeze.whatif.partition import PARTITIONS

# With more stages a terminal is too narrow for a value of each; files have them all.
_MAX_STAGES_SHOWN = 8
_WIDTH = 100  # of a terminal
# What is asked for in several ways that may come to the same.
_ASKED = ("r_max", "split")
_WORTH = 0.01  # of a step, that is told
# What a grid asks for, which each case has.
_OF_CASES = ("schedules", "caps", "microbatches", "splits", "time_limit_s")


@dataclass(frozen=True)
class Report:
    """Question and answer, as a table for the terminal, as JSON and as CSV."""

    title: str
    asked: Mapping[str, Any]  # what JSON has besides the cases and notes
    cells: Sequence[Mapping[str, str]]  # of each case, by the titles of columns
    rows: Sequence[Mapping[str, Any]]  # each case as plain data; None for what is not known
    below: Sequence[str]  # lines below the table
    notes: Sequence[str]

    def text(self) -> str:
        """Return the table under its title, with notes below, as wide as a terminal.

        Empty columns are left out. Common values of all rows, and equal rows, are shown once;
        columns without room are named.
        """
        columns = [name for name in self.cells[0] if any(row[name] for row in self.cells)]
        values = {name: {row[name] for row in self.cells} for name in columns}
        common = [n for n in columns[1:] if len(self.cells) > 1 and len(values[n]) == 1]
        columns = [name for name in columns if name not in common]
        left_out: list[str] = []
        while len((lines := _table(self.cells, columns))[0]) > _WIDTH:
            left_out.insert(0, columns.pop())
        above = self.title.split("\n")
        if common:
            alike = ", ".join(f"{name} {self.cells[0][name]}" for name in common)
            above.append(f"in all rows: {alike}")
        below = [*self.below, *self.notes]
        if left_out:
            below.insert(0, f"without room here, in --csv: {', '.join(left_out)}")
        return "\n".join([*map(_wrapped, above), "", *lines, "", *map(_wrapped, below)])

    def json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**self.asked, "cases": self.rows, "notes": self.notes}, indent=2) + "\n"

    def csv(self) -> str:
        """Return the cases as CSV; lists are joined by spaces, unknown values are empty."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.rows[0])
        for row in self.rows:
            writer.writerow(
                " ".join(map(str, value)) if isinstance(value, tuple) else spreadsheet_cell(value)
                for value in row.values()
            )
        return buffer.getvalue()


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(cells: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table; rows unlike in the question alone are joined."""
    rows = [{name: row[name] for name in columns} for row in cells]
    for asked in (name for name in _ASKED if name in columns):
        alike: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for row in rows:
            alike.setdefault(tuple((row | {asked: ""}).values()), []).append(row)
        rows = [
            same[0] | {asked: " ".join(dict.fromkeys(row[asked] for row in same))}
            for same in alike.values()
        ]
    table = [columns, *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    return ["  ".join(map(str.rjust, row, widths)) for row in table]


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
            "unit": file.metadata.unit,
        },
        [cells_of(case, file.metadata.unit or "tokens") for case in answer.cases],
        [asdict(case) for case in answer.cases],
        [TOLD["plan"]["legend"]],
        answer.notes,
    )


def title_of(file: BoundsFile, grid: Grid, recalled: tuple[float, float] | None) -> str:
    """Return the origin of the metrics, and the quality of their stage times."""
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
    """Say whether freezing pays, and name the case with the shortest time to a loss, as TOML.

    Below stand the case with the shortest microbatches, and adapters.
    """
    shortest, soonest = min(cases, key=lambda case: case.frozen_microbatch_ms), soonest_of(cases)
    unfrozen_ms = soonest.per_microbatch(soonest.step_ms)
    verdict = "freezing does not pay: nothing reaches a loss sooner, as estimated"
    text = f"{_where(soonest)}, without freezing: {unfrozen_ms:.2f} ms a microbatch"
    freezing = [f'method = "{NONE}"']
    if (least := _least(soonest)) < 1.0:
        verdict = f"freezing pays: a loss in {least:.2f} of the time without it, as estimated"
        text = f"{_frozen(soonest)}, times {soonest.steps_factor:.2f} steps"
        cap = soonest.max_freeze_ratio
        freezing = [f'method = "{PLANNED}"', f"max_freeze_ratio = {json.dumps(cap)}"]
        if soonest.gradient_rank is not None:
            freezing.append(f"gradient_rank = {soonest.gradient_rank}")
    elif all(case.time_to_loss is None for case in cases):
        verdict = "whether freezing pays is not known: no case has an estimated time to a loss"
    cut = [f'partition = "{soonest.split}"'] if soonest.split in PARTITIONS else []
    adapted = min(cases, key=lambda case: case.per_microbatch(case.all_frozen_step_ms))
    adapted_ms = adapted.per_microbatch(adapted.all_frozen_step_ms)
    return [
        verdict,
        f"shortest time to a loss: {text}",
        *("", "[parallelism]", f'pipeline_parallel_schedule = "{soonest.schedule}"', *cut),
        *("", "[freezing]", *freezing, ""),
        f"shortest step with freezing: {_frozen(shortest)}",
        f'adapters (method = "{LORA}") leave out gradients: {_where(adapted)}, {adapted_ms:.2f} ms '
        "a microbatch",
        "",
    ]


def first_sentence(measured: ScheduleCases, cases: Sequence[Case]) -> str:
    """Say how much of its time the measured pipeline waits, and what makes a step shorter."""
    step_ms, bubble = measured.unfrozen(None)
    n_microbatches = measured.order.n_microbatches * measured.grid.batches
    shortest_ms = step_ms = step_ms / n_microbatches
    best, best_ms = measured.best
    offers = []
    if best is not None and best_ms is not None:
        cut = f"a split of {', '.join(map(str, best))}"
        offers.append((best_ms / n_microbatches, cut))
    fastest = min(cases, key=lambda case: case.per_microbatch(case.step_ms))
    schedule, _, rest = _where(fastest).partition(", ")
    offers.append((fastest.per_microbatch(fastest.step_ms), f"{schedule} ({rest})"))
    soonest = soonest_of(cases)
    if pays(soonest):
        how = f"r_max {render_cap(soonest.max_freeze_ratio)}, {soonest.steps_factor:.2f} times the"
        offers.append((soonest.frozen_microbatch_ms, f"freezing ({_where(soonest)}, {how} steps)"))
    told = []
    for ms, how in offers:
        if ms < shortest_ms * (1.0 - _WORTH):
            told.append(f"{how} takes off {1.0 - ms / step_ms:.0%}")
            shortest_ms = ms
    nothing = "no schedule or split that was asked for takes off 1%"
    return f"your pipeline waits {bubble:.0%} of its time; {', '.join(told) or nothing}"


def soonest_of(cases: Sequence[Case]) -> Case:
    """Return the case with the shortest time to a loss."""
    return min(cases, key=lambda case: case.per_microbatch(case.step_ms) * _least(case))


def pays(case: Case) -> bool:
    """Return whether a case's plan reaches a loss sooner, as estimated."""
    return _least(case) < 1.0


def _least(case: Case) -> float:
    """Return the time to a loss over the time without freezing, of the better of both."""
    return 1.0 if case.time_to_loss is None else min(1.0, case.time_to_loss)


def _frozen(case: Case) -> str:
    cap = render_cap(case.max_freeze_ratio)
    rank = "" if case.gradient_rank is None else f", rank {case.gradient_rank}"
    return f"{_where(case)}, r_max {cap}{rank}: {case.frozen_microbatch_ms:.2f} ms a microbatch"


def _where(case: Case) -> str:
    split = "" if case.split == DEFAULT_SPLIT else f", split {case.split}"
    return f"{case.schedule}, {case.n_microbatches} microbatches{split}"


def cells_of(case: Case, unit: str) -> dict[str, str]:
    """Return a case's cells; throughput counts ``unit``."""
    row = asdict(case) | {"max_freeze_ratio": render_cap(case.max_freeze_ratio)}
    values = {k: _Stages(v) if isinstance(v, tuple) else v for k, v in row.items()}
    return {title.format(unit=unit): cell for title, cell in _cells("plan", values).items()}


class _Stages(tuple[float, ...]):
    """A value per stage, or their range in a narrow row."""

    def __format__(self, form: str) -> str:
        if len(self) > _MAX_STAGES_SHOWN:
            return f"{min(self):{form}} to {max(self):{form}}"
        return ("," if form == "d" else " ").join(format(value, form) for value in self)


def _cells(table: str, values: Mapping[str, Any]) -> dict[str, str]:
    def cell(form: str) -> str:
        names = [name for _, name, *_ in Formatter().parse(form) if name]
        return "" if any(values[name] is None for name in names) else form.format_map(values)

    return {title: cell(form) for title, form in TOLD[table]["columns"].items()}


def front_report(answer: Answer[FrontCase], file: BoundsFile, grid: Grid) -> Report:
    """Return the report on frozen fronts."""
    rows = [asdict(case) for case in answer.cases]
    asked = ("n_ranks", "n_processors", "p2p_overhead_ms", "link_gb_per_s")
    return Report(
        title_of(file, grid, recall(file)),
        {"bounds": str(file.path), **{key: getattr(grid, key) for key in asked}},
        [_front_cells(row) for row in rows],
        rows,
        [TOLD["front"]["legend"]],
        answer.notes,
    )


def _front_cells(row: Mapping[str, Any]) -> dict[str, str]:
    unfrozen_ms = row["unfrozen_ms"]

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return render_split(value)
        if value is None or not key.endswith("_ms") or key in ("unfrozen_ms", "exchange_ms"):
            return value
        return f"{value / unfrozen_ms:.2f}" if unfrozen_ms > 0.0 else None

    return _cells("front", {key: shown(key, value) for key, value in row.items()})
