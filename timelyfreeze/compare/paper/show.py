"""Shows a table or a figure of the paper from the runs that a folder has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import COLUMNS, Terms
from timelyfreeze.compare.paper.items import COMPARED, FIGURE, Item
from timelyfreeze.compare.paper.studies import BASE, Study, Values, measured
from timelyfreeze.compare.plots import plots
from timelyfreeze.compare.runs import find_runs, flatten
from timelyfreeze.compare.runs.run import BASE_MODEL
from timelyfreeze.files import markdown_table, write_whole
from timelyfreeze.plots import gallery, style
from timelyfreeze.records import BENCHMARKS, Scores, read_scores


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


_UNKNOWN = "-"
_FORMS = {column.key: column.form for column in COLUMNS}
_TITLES = {column.key: column.title for column in COLUMNS}


def runs_beside(
    study: Study, groups: Sequence[Group], base: Scores | None, columns: Sequence[str]
) -> str:
    """Return the table of a study: of each metric ours, the paper's, and the difference.

    Ours are means over seeds. Where ours was not measured, only the paper's stands there.

    Args:
        study: What was run.
        groups: What came out, from ``compare.groups.group``.
        base: Scores of the model before training; None if it was not scored.
        columns: Keys of the metrics.
    """
    found = {(one.schedule, one.method): one for one in groups}
    rows = []
    if "accuracy" in columns:
        before = {} if base is None else _accuracies(base)
        rows.append(["", "before training", *_cells(before, (study.model, "", BASE), columns)])
    for schedule in study.schedules:
        for method in study.methods:
            ours = _means(found.get((schedule, method)), columns)
            cells = _cells(ours, (study.model, schedule, method), columns)
            rows.append([schedule, method, *cells])
    return markdown_table(["schedule", "method", *_heads(columns)], rows)


def _heads(columns: Sequence[str]) -> Iterator[str]:
    for key in columns:
        yield from (f"{_TITLES[key]}: ours", "paper", "difference")


def _means(group: Group | None, columns: Sequence[str]) -> dict[str, float]:
    if group is None:
        return {}
    spreads = {key: group.spread(key) for key in columns}
    return {key: spread.mean for key, spread in spreads.items() if spread is not None}


def _accuracies(scores: Scores) -> dict[str, float]:
    """Return percents under the keys of a comparison's columns."""
    found = {
        f"accuracy_{one.key}": 100.0 * scores.benchmarks[one.key].accuracy
        for one in BENCHMARKS
        if one.key in scores.benchmarks
    }
    average = scores.average
    return found if average is None else {**found, "accuracy": 100.0 * average}


def _cells(ours: Values, names: tuple[str, str, str], columns: Sequence[str]) -> Iterator[str]:
    papers = measured()[names]
    for key in columns:
        form, pair = _FORMS[key], (ours.get(key), papers.get(key))
        yield from (_UNKNOWN if value is None else format(value, form) for value in pair)
        if None in pair:
            yield _UNKNOWN
        else:
            yield format(ours[key] - papers[key], f"+{form.removeprefix('+')}")


@dataclass(frozen=True)
class DrawnFigure:
    """What became of a figure.

    Attributes:
        files: PNG and SVG files.
        missing: Why there is none, or what is not in it.
    """

    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()


def draw_figure(item: Item, groups: Sequence[Group], folder: Path) -> DrawnFigure:
    """Draw a figure of the paper from runs into a folder.

    Raises:
        ValueError: If a run's file cannot be read.
    """
    origin, kind = item.plot
    name = f"figure_{item.number}"
    if origin == COMPARED:
        return _compared(kind, groups, folder, name)
    runs = [run for one in groups for run in one.runs]
    if not runs:
        return DrawnFigure((), ("no run has finished",))
    figure = dict(gallery.PLOTS)[kind](runs[0].folder)
    if isinstance(figure, str):
        return DrawnFigure((), (figure,))
    return DrawnFigure(tuple(style.save(figure, folder, name)))


def _compared(kind: str, groups: Sequence[Group], folder: Path, name: str) -> DrawnFigure:
    files: list[Path] = []
    missing: list[str] = []
    for plot in plots(groups, Terms()):
        if plot.kind == kind:
            missing += plot.missing
            if plot.figure is not None:
                number = f"_{plot.number}" if plot.number > 1 else ""
                files += style.save(plot.figure, folder, f"{name}{number}")
    return DrawnFigure(tuple(files), tuple(missing))


MODELS = ("Llama-3.2-1B", "Llama-3-8B", "Llama-2-13B")
# Title, key of the configuration, and the paper's values by model.
ROWS: tuple[tuple[str, str, tuple[Any, Any, Any]], ...] = (
    ("dataset", "training.dataset", ("Alpaca-GPT4", "OpenHermes-2.5", "OpenHermes-2.5")),
    ("steps", "training.steps", (800, 2000, 2000)),
    ("warm-up steps", "lr_scheduler.warmup_steps", (100, 200, 200)),
    ("optimizer", "optimizer.name", ("AdamW",) * 3),
    ("learning rate", "optimizer.lr", (5e-6, 3e-6, 3e-6)),
    ("decay", "lr_scheduler.decay_type", ("cosine",) * 3),
    ("global batch", "training.global_batch_size", (128, 64, 64)),
    ("local batch", "training.local_batch_size", (16,) * 3),
    ("sequence length", "training.seq_len", (1024,) * 3),
    ("pipeline degree", "parallelism.pipeline_parallel_degree", (4,) * 3),
    # Eight microbatches.
    ("rows of a microbatch", "parallelism.pipeline_parallel_microbatch_size", (2,) * 3),
    ("T_w", "freezing.last_warmup_step", (60, 160, 150)),
    ("T_m", "freezing.last_monitor_step", (100, 200, 200)),
    ("T_f", "freezing.last_ramp_step", (200, 250, 250)),
    ("r_max", "freezing.max_freeze_ratio", (0.8,) * 3),
    ("T_APF", "freezing.apf.threshold", (0.01, 0.0001, 0.0001)),
    ("P_Auto", "freezing.autofreeze.percentile", (80.0,) * 3),
)

# What the names of our loaders stand for.
_DATASETS = {"alpaca": "Alpaca-GPT4", "sharegpt": "OpenHermes-2.5"}
_SEEDS = ((42, 22, 11), (42, 22, 11), (42,))


def settings_beside(studies: Sequence[Study]) -> str:
    """Return Table 3: of each model what its configuration file says, and what the paper says."""
    files = [flatten(study.settings()) for study in studies]
    heads = [head for study in studies for head in (f"{study.model}: ours", "paper")]
    rows = []
    for title, key, papers in ROWS:
        cells = []
        for study, settings in zip(studies, files, strict=True):
            own = settings.get(key, "-")
            cells += [str(_DATASETS.get(own, own)), str(papers[MODELS.index(study.model)])]
        rows.append([title, key, *cells])
    seeds = [(study.seeds, _SEEDS[MODELS.index(study.model)]) for study in studies]
    rows.append(["seeds", "", *(", ".join(map(str, one)) for pair in seeds for one in pair)])
    return markdown_table(["", "key", *heads], rows)
