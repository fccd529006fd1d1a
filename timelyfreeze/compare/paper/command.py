"""The paper's tables and figures (arXiv:2602.05754), each from one command.

    timelyfreeze paper                                all of them
    timelyfreeze paper table 4                        what it needs, how long it takes, what it runs
    timelyfreeze paper table 4 OUTPUT [-- --key=...]  runs or resumes it, and shows it
    timelyfreeze paper figure 7 OUTPUT --small        the same with a small model on this machine
    timelyfreeze paper table 4 --plans PLAN.json ...  plans beside the paper, nothing is run

OUTPUT holds the runs of all tables and figures; they share them. What it has already is not run
again. A table goes to OUTPUT/table_4.md too, figures to OUTPUT/figure_7.png and .svg. What follows
-- goes to the trainer, after the settings of the paper. Exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.compare import command as compare_command
from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.paper.beside import runs_beside
from timelyfreeze.compare.paper.figures import draw_figure
from timelyfreeze.compare.paper.items import FIGURE, ITEMS, TABLE, Item
from timelyfreeze.compare.paper.measured import SPEEDS
from timelyfreeze.compare.paper.planned import plans_beside, read_plans
from timelyfreeze.compare.paper.settings import settings_beside
from timelyfreeze.compare.paper.studies import Study
from timelyfreeze.compare.runs import find_runs
from timelyfreeze.compare.runs.jobs import Starter, start
from timelyfreeze.compare.runs.run import BASE_MODEL
from timelyfreeze.files import write_whole
from timelyfreeze.files.options import existing_file, parse_with_keys, status_of
from timelyfreeze.records import read_scores

_SETTINGS = 3  # the table of settings, which needs no run


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """List, tell, run or show, and return the exit status."""
    options, keys = parse_with_keys(_parser(), arguments)
    return status_of(lambda: _work(options, keys, starter))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("kind", nargs="?", choices=(TABLE, FIGURE))
    add("number", nargs="?", type=int, metavar="N", help="as in the paper")
    add("output", nargs="?", type=Path, metavar="OUTPUT", help="folder of all runs")
    add("--small", action="store_true", help="a small model, one seed, emulated by one process")
    add("--emulate", action="store_true", help="one process and one device for all ranks")
    add("--show", action="store_true", help="run nothing, show what OUTPUT has")
    scores = "score each run, which accuracies need: options of timelyfreeze evaluate, or ''"
    add("--evaluate", metavar="OPTIONS", help=scores)
    add("--schedules", nargs="+", default=[], help="of the paper's, these alone")
    add("--methods", nargs="+", default=[], help="none, and of the paper's these alone")
    add("--seeds", nargs="+", type=int, default=[], help="instead of the paper's")
    plans = "what timelyfreeze plan --json wrote"
    add("--plans", nargs="+", type=existing_file, metavar="FILE", help=plans)
    return parser


def _work(options: argparse.Namespace, keys: Sequence[str], starter: Starter) -> int:
    if options.kind is None:
        print("\n".join(f"{item.name:10} {item.missing or item.title}" for item in ITEMS))
        return 0
    item = _item(options)
    if item.missing:
        raise ValueError(f"{item.name} ({item.title}): {item.missing}")
    if options.kind == TABLE and options.number == _SETTINGS:
        print(settings_beside(item.studies))
        return 0
    if options.plans:
        return _plans(item, options.plans)
    item = item.narrowed(options.schedules, options.methods, options.seeds, small=options.small)
    if options.emulate:
        item = item.emulated()
    if options.output is None:
        print(needs(item, options.evaluate, keys))
        return 0
    output, status = options.output.resolve(), 0
    for study in () if options.show else item.studies:
        words = study.command(output, options.evaluate, keys)
        print(f"timelyfreeze compare {shlex.join(words)}\n", flush=True)
        status = max(status, compare_command.main(words, starter=starter))
        if status > 1:
            return status
    print()
    _show(item, output)
    return status


def _item(options: argparse.Namespace) -> Item:
    for item in ITEMS:
        if (item.kind, item.number) == (options.kind, options.number):
            return item
    known = ", ".join(str(item.number) for item in ITEMS if item.kind == options.kind)
    raise ValueError(f"{options.kind} {options.number} is not there; {options.kind}s are {known}")


def _plans(item: Item, files: Sequence[Path]) -> int:
    if item.columns != SPEEDS:
        tables = ", ".join(str(one.number) for one in ITEMS if one.columns == SPEEDS)
        raise ValueError(f"--plans is for tables {tables}, which have speeds; not for {item.name}")
    (study,) = item.studies
    print(plans_beside(study, read_plans(files, study.max_freeze_ratio)))
    return 0


def needs(item: Item, evaluate: str | None, keys: Sequence[str]) -> str:
    """Return what an item needs, how long its runs take, and the commands that make them."""
    lines = [f"{item.name}: {item.title}"]
    for study in item.studies:
        files = study.settings()
        folder, training = files["model"]["hf_assets_path"], files["training"]
        rows = training.get("dataset_path", f"{training['dataset']}, from the hub")
        took = "minutes" if study.is_small else f"{study.hours():.2g} hours by the paper's tokens/s"
        words = study.command(Path("OUTPUT"), evaluate, keys)
        lines += [
            "",
            f"devices  {_devices(study)}",
            f"model    {folder} (another: -- --model.hf_assets_path=FOLDER)",
            f"rows     {rows} (others: -- --training.dataset_path=FILE)",
            f"takes    {study.n_runs} runs, {took}",
            f"runs     timelyfreeze compare {shlex.join(words)}",
        ]
    if evaluate is None and any("accuracy" in one for one in [item.columns, item.plot]):
        lines += ["", "accuracies come with --evaluate OPTIONS"]
    return "\n".join(lines)


def _devices(study: Study) -> str:
    if study.is_emulated:
        return f"one, for {study.n_ranks} emulated ranks"
    return f"{study.hardware}; or one, with --emulate"


def _show(item: Item, output: Path) -> None:
    """Print the table, or draw the figure, of what runs have left.

    Raises:
        ValueError: If there is none.
    """
    for study in item.studies:
        if not (output / study.folder).is_dir():
            raise ValueError(f"{output / study.folder} is not there; run {item.name} first")
    if item.kind == FIGURE:
        drawn = draw_figure(item, _groups(item.studies, output), output)
        lines = [f"wrote {file}" for file in drawn.files]
        print("\n".join([*lines, *(f"missing: {why}" for why in drawn.missing)]))
        if item.says:
            print(f"the paper: {item.says}")
        return
    for study in item.studies:
        base = read_scores(output / study.folder / BASE_MODEL)
        table = runs_beside(study, _groups([study], output), base, item.columns)
        about = f"{item.name}: {item.title}. The paper's: {study.hardware}."
        if study.is_small:
            about += " Ours is a model of some million parameters: only the form can be compared."
        text = f"{about}\n\n{table}\n"
        print(text, end="")
        write_whole(output / f"table_{item.number}.md", text.encode())


def _groups(studies: Sequence[Study], output: Path) -> list[Group]:
    """Return the groups of the studies' runs, whose folders may hold those of others too."""
    wanted = {
        (s.folder, schedule, m) for s in studies for schedule in s.schedules for m in s.methods
    }
    found = []
    for folder in dict.fromkeys(study.folder for study in studies):
        runs = find_runs([output / folder]).runs
        found += [
            one
            for one in group(compare(runs, Terms()))
            if (folder, one.schedule, one.method) in wanted
        ]
    return found
