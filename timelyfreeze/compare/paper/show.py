"""Shows a table or a figure of the paper from the runs that a folder has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.paper.beside import runs_beside
from timelyfreeze.compare.paper.figures import draw_figure
from timelyfreeze.compare.paper.items import FIGURE, Item
from timelyfreeze.compare.paper.studies import Study
from timelyfreeze.compare.runs import find_runs
from timelyfreeze.compare.runs.run import BASE_MODEL
from timelyfreeze.files import write_whole
from timelyfreeze.records import Scores, read_scores


def show(item: Item, output: Path, *, keeps: bool) -> int:
    """Print the table, or draw the figure, of what runs have left.

    Args:
        item: The table or figure.
        output: Folder of all runs.
        keeps: Whether a table goes to a file too.

    Returns:
        The exit status: 1 if something cannot be read, or no figure could be drawn.

    Raises:
        ValueError: If there are no runs.
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
        problems += _tabulate(item, output, keeps=keeps)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _draw(item: Item, groups: Sequence[Group], output: Path) -> list[str]:
    drawn = draw_figure(item, groups, output)
    for file in drawn.files:
        print(f"wrote {file}")
    missing = [f"missing: {why}" for why in drawn.missing]
    if drawn.files:
        print("\n".join([*missing, *([f"the paper: {item.says}"] if item.says else [])]))
    return [] if drawn.files else missing


def _tabulate(item: Item, output: Path, *, keeps: bool) -> list[str]:
    parts, problems = [], []
    for study in item.studies:
        part, found = _table(item, study, output)
        parts.append(part)
        problems += found
    text = "\n".join(parts)
    print(text, end="")
    if keeps:
        print(f"\nwrote {write_whole(output / f'table_{item.number}.md', text.encode())}")
    return problems


def _table(item: Item, study: Study, output: Path) -> tuple[str, list[str]]:
    """Return a study's table with a line about it, and what of its scores cannot be read."""
    groups, _ = _groups([study], output)
    problems: list[str] = []
    base: Scores | None = None
    place = output / study.folder / BASE_MODEL
    try:
        base = read_scores(place)
    except ValueError as error:
        problems.append(f"not read: {place}: {error}")
    places = "; ".join(dict.fromkeys(one.place for one in groups if one.runs))
    title = item.title if len(item.studies) == 1 else study.model
    about = f"{item.name}: {title}. The paper's: {study.hardware}. Ours: {places or 'none'}."
    if study.is_small:
        about += " A small model stands for the paper's: only the form can be compared."
    return f"{about}\n\n{runs_beside(study, groups, base, item.columns)}\n", problems


def _groups(studies: Sequence[Study], output: Path) -> tuple[list[Group], list[str]]:
    """Return the groups of the studies' own runs, and what of their folders cannot be read.

    A folder may hold runs of other tables and figures too.
    """
    found: list[Group] = []
    problems: list[str] = []
    for folder in dict.fromkeys(study.folder for study in studies):
        here = [study for study in studies if study.folder == folder]
        wanted = {
            (schedule, method, seed)
            for study in here
            for schedule in study.schedules
            for method in study.methods
            for seed in study.seeds
        }
        below = find_runs([output / folder])
        problems += [f"not read: {problem}" for problem in below.unreadable]
        runs = [run for run in below.runs if (run.schedule, run.method, run.seed) in wanted]
        found += group(compare(runs, Terms()))
    return found, problems
