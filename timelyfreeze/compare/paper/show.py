"""Shows a table or a figure of the paper from the runs that a folder has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import COLUMN_OF, Terms
from timelyfreeze.compare.paper.items import COMPARED, FIGURE, Item
from timelyfreeze.compare.paper.studies import BASE, TOLD, Study, Values, measured
from timelyfreeze.compare.plots import plots
from timelyfreeze.compare.runs.run import BASE_MODEL, find_runs, flatten
from timelyfreeze.files import markdown_table, write_whole
from timelyfreeze.plots import gallery, style
from timelyfreeze.records import BENCHMARKS, Scores, read_scores

UNKNOWN = "-"


def show(item: Item, output: Path, *, keeps: bool) -> int:
    """Print the table, or draw the figure, of what runs have left.

    Args:
        item: The table or figure.
        output: Folder of all runs.
        keeps: Whether a table goes to a file too.

    Returns:
        The exit status: 1 if something cannot be read, or no figure could be drawn.

    Raises:
        ValueError: If there are no runs, or a run's file cannot be read.
    """
    for study in item.studies:
        if not (output / study.folder).is_dir():
            raise ValueError(f"{output / study.folder} is not there; run {item.name} first")
    groups, problems = _groups(item.studies, output)
    if not any(one.runs for one in groups):
        problems.append(f"no run of {item.name} has finished in {output}")
    elif item.kind == FIGURE:
        problems += _draw(item, groups, output)
    else:
        text = "\n".join(_table(item, study, output, problems) for study in item.studies)
        print(text, end="")
        if keeps:
            print(f"\nwrote {write_whole(output / f'table_{item.number}.md', text.encode())}")
    print("".join(f"{problem}\n" for problem in problems), end="")
    return 1 if problems else 0


def _draw(item: Item, groups: Sequence[Group], folder: Path) -> list[str]:
    """Draw a figure of the paper; return why there is none, if so."""
    origin, kind = item.plot
    files: list[Path] = []
    missing: list[str] = []
    if origin == COMPARED:
        for plot in plots(groups, Terms()):
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


def _table(item: Item, study: Study, output: Path, problems: list[str]) -> str:
    """Return a study's table with a line about it; ``problems`` gets what cannot be read."""
    groups, _ = _groups([study], output)
    base, place = None, output / study.folder / BASE_MODEL
    try:
        base = read_scores(place)
    except ValueError as error:
        problems.append(f"not read: {place}: {error}")
    places = "; ".join(dict.fromkeys(one.place for one in groups if one.runs))
    title = item.title if len(item.studies) == 1 else study.model
    about = f"{item.name}: {title}. The paper's: {study.hardware}. Ours: {places or 'none'}."
    if study.is_small:
        about += " A small model stands for the paper's: only the form can be compared."
    return f"{about}\n\n{_runs_beside(study, groups, base, item.columns)}\n"


def _groups(studies: Sequence[Study], output: Path) -> tuple[list[Group], list[str]]:
    """Return the groups of the studies' own runs, and what of their folders cannot be read.

    A folder may hold runs of other tables and figures too.
    """
    found: list[Group] = []
    problems: list[str] = []
    for folder in dict.fromkeys(study.folder for study in studies):
        wanted = {
            (schedule, method, seed)
            for study in studies
            if study.folder == folder
            for schedule in study.schedules
            for method in study.methods
            for seed in study.seeds
        }
        below = find_runs([output / folder])
        problems += [f"not read: {problem}" for problem in below.unreadable]
        runs = [run for run in below.runs if (run.schedule, run.method, run.seed) in wanted]
        found += group(compare(runs, Terms()))
    return found, problems


def _runs_beside(
    study: Study, groups: Sequence[Group], base: Scores | None, keys: Sequence[str]
) -> str:
    """Return the table of a study: of each metric ours, the paper's, and the difference.

    Ours are means over seeds. Where ours was not measured, only the paper's stands there.
    """
    found = {(one.schedule, one.method): one for one in groups}
    rows = []
    if "accuracy" in keys:
        rows.append(
            ["", "before training", *_cells(_accuracies(base), (study.model, "", BASE), keys)]
        )
    for schedule in study.schedules:
        for method in study.methods:
            one = found.get((schedule, method))
            spreads = {key: one and one.spread(key) for key in keys}
            ours = {key: spread.mean for key, spread in spreads.items() if spread}
            rows.append([schedule, method, *_cells(ours, (study.model, schedule, method), keys)])
    heads = [
        text for key in keys for text in (f"{COLUMN_OF[key].title}: ours", "paper", "difference")
    ]
    return markdown_table(["schedule", "method", *heads], rows)


def _accuracies(scores: Scores | None) -> dict[str, float]:
    """Return percents under the keys of a comparison's columns."""
    known: Mapping[str, float | None] = {} if scores is None else {
        "accuracy": scores.average,
        **{f"accuracy_{one.key}": scores.benchmarks[one.key].accuracy
           for one in BENCHMARKS if one.key in scores.benchmarks},
    }  # fmt: skip
    return {key: 100.0 * value for key, value in known.items() if value is not None}


def _cells(ours: Values, names: tuple[str, str, str], keys: Sequence[str]) -> list[str]:
    papers, cells = measured()[names], []
    for key in keys:
        form, own, other = COLUMN_OF[key].form, ours.get(key), papers.get(key)
        cells += [UNKNOWN if value is None else format(value, form) for value in (own, other)]
        if own is None or other is None:
            cells.append(UNKNOWN)
        else:
            cells.append(format(own - other, f"+{form.removeprefix('+')}"))
    return cells


# What the names of our loaders stand for.
_DATASETS = {"alpaca": "Alpaca-GPT4", "sharegpt": "OpenHermes-2.5"}


def settings_beside(studies: Sequence[Study]) -> str:
    """Return Table 3: of each model what its configuration file says, and what the paper says."""
    files = [
        flatten(study.settings()) | {"": ", ".join(map(str, study.seeds))} for study in studies
    ]
    heads = [head for study in studies for head in (f"{study.model}: ours", "paper")]
    rows = []
    for title, key, *papers in TOLD["items"]["settings"]:
        ours = [settings.get(key, UNKNOWN) for settings in files]
        pairs = zip([_DATASETS.get(own, own) for own in ours], papers, strict=True)
        rows.append([title, key, *(str(one) for pair in pairs for one in pair)])
    return markdown_table(["", "key", *heads], rows)
