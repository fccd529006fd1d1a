"""A table or figure of the paper, from the runs of a folder, or from plans.

A plan file, of ``timelyfreeze plan --json``, gives Tables 1, 4 and 5 before any training. Compared
are whole steps: a plan's step has its batches and, where the file of bounds or ``--outside-ms``
tells it, the optimizer's time too. Splits other than the default are left out, and so are caps
unknown to the paper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import COLUMN_OF, Column, Criteria, accuracies
from timelyfreeze.compare.paper import items
from timelyfreeze.compare.plots import plots
from timelyfreeze.compare.runs.run import BASE_MODEL, find_runs, flatten
from timelyfreeze.files import Within, markdown_table, parse_json, read_dataclass, write_whole
from timelyfreeze.plots import gallery, style
from timelyfreeze.records.scores import Scores, read_scores
from timelyfreeze.whatif.grid import DEFAULT_SPLIT

UNKNOWN = "-"


def show(item: items.Item, output: Path, *, keeps: bool) -> int:
    """Print the table, or draw the figure, from the runs' files."""
    for study in item.studies:
        if not (output / study.folder).is_dir():
            raise ValueError(f"{output / study.folder} is not there; run {item.name} first")
    groups, problems = _groups(item.studies, output)
    if not any(one.runs for one in groups):
        problems.append(f"no run of {item.name} has finished in {output}")
    elif item.kind == items.FIGURE:
        problems += _draw(item, groups, output)
    else:
        text = _table(item, output, problems)
        print(text, end="")
        if keeps:
            name = f"{item.kind}_{item.number}.md"
            print(f"\nwrote {write_whole(output / name, text.encode())}")
    print("".join(f"{problem}\n" for problem in problems), end="")
    return 1 if problems else 0


def _draw(item: items.Item, groups: Sequence[Group], folder: Path) -> list[str]:
    """Draw a figure of the paper; return why there is none, if so."""
    origin, kind = item.plot
    files: list[Path] = []
    missing: list[str] = []
    if origin == items.COMPARED:
        for plot in plots(groups, Criteria()):
            if plot.kind == kind:
                missing += [f"missing: {why}" for why in plot.missing]
                if plot.figure is not None:
                    name = plot.name.replace(kind, f"figure_{item.number}")
                    files += style.save(plot.figure, folder, name)
    else:
        first = next(run for one in groups for run in one.runs)
        figure = dict(gallery.PLOTS)[kind](first.folder)
        if isinstance(figure, str):
            missing.append(f"missing: {figure}")
        else:
            files += style.save(figure, folder, f"figure_{item.number}")
    if not files:
        return missing
    says = [f"the paper: {item.says}"] if item.says else []
    print("\n".join([*(f"wrote {file}" for file in files), *missing, *says]))
    return []


def _table(item: items.Item, output: Path, problems: list[str]) -> str:
    """Return a table with a heading line; ``problems`` gets unreadable runs."""
    heads = ["schedule", "method"] if len(item.studies) == 1 else ["", "schedule", "method"]
    for key in item.columns:
        heads += [f"{_COLUMN_OF[key].title}: ours", "paper", "difference"]
    places: dict[str, None] = {}
    folders: set[str] = set()
    rows: list[list[str]] = []
    for study in item.studies:
        groups, _ = _groups([study], output)
        places |= dict.fromkeys(one.place for one in groups if one.runs)
        base, place = None, output / study.folder / BASE_MODEL
        try:
            base = read_scores(place)
        except ValueError as error:
            problems.append(f"not read: {place}: {error}")
        own = _rows_beside(study, groups, base, item.columns)
        if study.folder in folders:  # whose run of none stands above
            own = [row for row in own if row[1] != "none"]
        folders.add(study.folder)
        rows += own if len(item.studies) == 1 else ([study.model, *row] for row in own)
    hardware = "; ".join(dict.fromkeys(study.hardware for study in item.studies))
    about = f"{item.name}: {item.title}. The paper's: {hardware}. Ours: {'; '.join(places)}."
    if any(study.is_small for study in item.studies):
        about += " A small model stands for the paper's: only the form can be compared."
    return f"{about}\n\n{markdown_table(heads, rows)}\n"


def _groups(studies: Sequence[items.Study], output: Path) -> tuple[list[Group], list[str]]:
    """Return the groups of the studies' own runs, and the unreadable folders."""
    found: list[Group] = []
    problems: list[str] = []
    for folder in dict.fromkeys(study.folder for study in studies):
        sharing = [study for study in studies if study.folder == folder]
        below = find_runs([output / folder])
        problems += [f"not read: {problem}" for problem in below.unreadable]
        runs = [run for run in below.runs if any(study.has(run) for study in sharing)]
        found += group(compare(runs, Criteria()))
    return found, problems


_SPEEDUP = Column("speedup", "speed-up of steps", ".2f")
_COLUMN_OF = COLUMN_OF | {_SPEEDUP.key: _SPEEDUP}


def _rows_beside(
    study: items.Study, groups: Sequence[Group], base: Scores | None, keys: Sequence[str]
) -> list[list[str]]:
    """Return the rows of a study: by metric ours, the paper's, and the difference.

    Ours are means over seeds. Where ours was not measured, only the paper's stands there.
    """
    found, rows = {(one.schedule, one.method): one for one in groups}, []
    if "accuracy" in keys:
        papers = items.measured()[study.model, "", items.BASE]
        cells = _cells(accuracies(base), papers, keys)
        rows.append(["", "before training", *cells])
    for schedule, method in product(study.schedules, study.methods):
        one = found.get((schedule, method))
        spreads = {key: one and one.spread(key) for key in keys if key in COLUMN_OF}
        ours = {key: spread.mean for key, spread in spreads.items() if spread}
        if one is not None:
            ours |= _speedup(one)
        own = study.paper if method == study.methods[-1] else {}
        papers = items.measured().get((study.model, schedule, method), own)
        rows.append([schedule, method, *_cells(ours, papers, keys)])
    return rows


def _speedup(one: Group) -> items.Values:
    """Return the mean time of none's steps over those of a group, without moves."""
    pairs = [(run.baseline.step_seconds, run.step_seconds) for run in one.runs if run.baseline]
    ratios = [none / own for none, own in pairs if own > 0.0]
    return {_SPEEDUP.key: fmean(ratios)} if ratios else {}


def _cells(ours: items.Values, papers: items.Values, keys: Sequence[str]) -> list[str]:
    cells = []
    for key in keys:
        form, own, other = _COLUMN_OF[key].form, ours.get(key), papers.get(key)
        cells += [UNKNOWN if value is None else format(value, form) for value in (own, other)]
        apart = None if own is None or other is None else own - other
        cells.append(UNKNOWN if apart is None else format(apart, f"+{form.removeprefix('+')}"))
    return cells


# What the names of our loaders stand for.
_DATASETS = {"alpaca": "Alpaca-GPT4", "sharegpt": "OpenHermes-2.5"}


def settings_beside(studies: Sequence[items.Study]) -> str:
    """Return Table 3: values of our configuration files beside the paper's."""
    files = [
        flatten(study.settings()) | {"": ", ".join(map(str, study.seeds))} for study in studies
    ]
    heads = [head for study in studies for head in (f"{study.model}: ours", "paper")]
    rows = []
    for title, key, *papers in items.TOLD["items"]["settings"]:
        ours = [settings.get(key, UNKNOWN) for settings in files]
        pairs = zip([_DATASETS.get(own, own) for own in ours], papers, strict=True)
        rows.append([title, key, *(str(one) for pair in pairs for one in pair)])
    return markdown_table(["", "key", *heads], rows)


_Number = Annotated[float, Within(-math.inf)]


@dataclass(frozen=True)
class Planned:
    """A case of a plan file; the speed is a device's under the plan."""

    schedule: str
    split: str
    max_freeze_ratio: Any
    gain: _Number
    upper_bound_gain: _Number
    mean_ratio: _Number
    tokens_per_second: _Number | None
    outside_ms: float = 0.0  # what a step has beside its batches, told once for all cases


@dataclass(frozen=True)
class _PlanFile:
    outside_ms: _Number
    cases: tuple[Planned, ...]


def read_plans(paths: Sequence[Path], max_freeze_ratio: float) -> dict[str, Planned]:
    """Return by schedule the plans of some files with the paper's cap and the default split."""
    found: dict[str, Planned] = {}
    for path in paths:
        try:
            file = read_dataclass(_PlanFile, parse_json(path.read_text()), partly=True)
        except ValueError as error:
            told = f"{path} is not what `timelyfreeze plan --json` writes"
            raise ValueError(f"{told}: {error}") from None
        for case in file.cases:
            if (case.split, case.max_freeze_ratio) != (DEFAULT_SPLIT, max_freeze_ratio):
                continue
            if case.schedule in found:
                raise ValueError(
                    f"{path} plans {case.schedule} once more; one plan of each schedule is shown"
                )
            found[case.schedule] = replace(case, outside_ms=file.outside_ms)
    if not set(found) & set(items.SCHEDULES):
        raise ValueError(
            f"{', '.join(map(str, paths))}: no plan with r_max {max_freeze_ratio:g} and the "
            f"{DEFAULT_SPLIT} split of {', '.join(items.SCHEDULES)}"
        )
    return found


def plans_beside(study: items.Study, plans: Mapping[str, Planned]) -> str:
    """Return the table of planned and measured values by method and schedule.

    A hybrid has the plan of TimelyFreeze, since its policy chooses tensors, not their number. The
    baselines plan nothing.
    """
    columns, rows = items.TOLD["items"]["plans"], []
    schedules = [schedule for schedule in items.SCHEDULES if schedule in plans]
    for schedule, method in product(schedules, items.METHODS):
        papers = items.measured()[study.model, schedule, method]
        values = {f"paper.{key}": value for key, value in papers.items()}
        values |= _ours(study, plans[schedule], method)
        cells = (format(values[k], form) if k in values else UNKNOWN for _, k, form in columns)
        rows.append([schedule, method, *cells])
    about = (
        f"{study.model}, r_max {study.max_freeze_ratio:g}: steps as planned, and as the paper "
        f"measured them on {study.hardware}."
    )
    if any(plan.outside_ms == 0.0 for plan in plans.values()):
        about += (
            " These plans have nothing beside the batches, the paper's steps have the optimizer, "
            "clipping and data in them: tell their time with `timelyfreeze plan --outside-ms`."
        )
    heads = ["schedule", "method", *(title for title, *_ in columns)]
    return f"{about}\n\n{markdown_table(heads, rows)}"


def _ours(study: items.Study, plan: Planned, method: str) -> items.Values:
    """Return a plan's values for a method."""
    speed = plan.tokens_per_second
    if method == "none":
        ours = {"planned_ratio": 0.0, "average_freeze_ratio": 0.0}
        speed = None if speed is None else speed / (1.0 + plan.gain)
    elif method.startswith("timelyfreeze"):
        ours = {
            "gain_percent": 100.0 * plan.gain,
            "upper_bound_percent": 100.0 * plan.upper_bound_gain,
            "planned_ratio": plan.mean_ratio,
            "average_freeze_ratio": over_all_steps(study, plan.mean_ratio),
        }
    else:
        return {}
    return ours if speed is None else {**ours, "device_tokens_per_second": speed}


def over_all_steps(study: items.Study, ratio: float) -> float:
    """Return the mean freeze ratio over all steps of a run with the planned ``ratio``.

    Phases as in Algorithm 1: nothing up to T_w and in the first half of monitoring, all in its
    second half, then a ramp up to T_f, step by step.
    """
    settings = study.settings()
    freezing, n_steps = settings["freezing"], settings["training"]["steps"]
    warmup, monitor, ramp = (freezing[f"last_{it}_step"] for it in ("warmup", "monitor", "ramp"))
    all_frozen = monitor - (warmup + monitor) // 2
    ramped = sum(ratio * (t - monitor) / (ramp - monitor) for t in range(monitor + 1, ramp + 1))
    return float((all_frozen + ramped + ratio * (n_steps - ramp)) / n_steps)
