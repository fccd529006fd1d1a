"""The paper's tables and figures (arXiv:2602.05754), each from one command.

    timelyfreeze paper                                all of them
    timelyfreeze paper table 4                        what it needs, how long it takes, what it runs
    timelyfreeze paper table 4 OUTPUT [-- --key=...]  runs or resumes it, and shows it
    timelyfreeze paper figure 7 OUTPUT --small        the same with a small model on this machine
    timelyfreeze paper table 4 --plans PLAN.json ...  plans beside the paper, nothing is run
    timelyfreeze paper pipetransformer 9 OUTPUT       an older system's figure or table, small

OUTPUT holds the runs of all tables and figures; they share them. What it has already is not run
again. A whole table goes to OUTPUT/table_4.md too, figures to OUTPUT/figure_7.png and .svg. What
follows -- goes to the trainer, after the settings of the paper. Exit status 1 if a run failed or
cannot be read, or a figure could not be drawn.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.compare import command as compare_command
from timelyfreeze.compare.curves import SPEED
from timelyfreeze.compare.paper.items import FIGURE, ITEMS, KINDS, TABLE, Item
from timelyfreeze.compare.paper.show import plans_beside, read_plans, settings_beside, show
from timelyfreeze.compare.runs.jobs import Starter, start
from timelyfreeze.files.options import existing_file, parse_with_keys, status_of


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
    add("kind", nargs="?", choices=KINDS)
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
    known = [item for item in ITEMS if options.kind in (None, item.kind)]
    if options.number is None:
        print("\n".join(f"{item.name:10} {item.title}{_why_not(item)}" for item in known))
        return 0
    item = next((one for one in known if one.number == options.number), None)
    if item is None:
        there = ", ".join(str(one.number) for one in known)
        raise ValueError(
            f"{options.kind} {options.number} is not there; {options.kind}s are {there}"
        )
    if item.missing:
        raise ValueError(f"{item.name} is not here: {item.title}{_why_not(item)}")
    if item.kind == TABLE and not item.columns:  # of settings, which needs no run
        print(settings_beside(item.studies))
        return 0
    if options.plans:
        return _plans(item, options)
    item = item.narrowed(options)
    if options.output is None:
        if options.show:
            raise ValueError("--show needs OUTPUT, the folder whose runs are shown")
        print(_needs(item, options.evaluate, keys))
        return 0
    is_scored = options.evaluate is not None or options.show
    if item.kind == FIGURE and item.shows_accuracy and not is_scored:
        raise ValueError(
            f"{item.name} shows accuracies; say how runs are scored: --evaluate OPTIONS of "
            "timelyfreeze evaluate, or --evaluate ''"
        )
    output, status = options.output.resolve(), 0
    for study in () if options.show else item.studies:
        words = study.command(output, options.evaluate, keys)
        print(f"timelyfreeze compare {shlex.join(words)}\n", flush=True)
        status = max(status, compare_command.main(words, starter=starter))
        if status > 1:
            return status
    print()
    is_whole = not (options.schedules or options.methods or options.seeds)
    return max(status, show(item, output, keeps=is_whole))


def _why_not(item: Item) -> str:
    return f" ({item.missing})" if item.missing else ""


def _plans(item: Item, options: argparse.Namespace) -> int:
    if SPEED not in item.columns:
        tables = ", ".join(str(one.number) for one in ITEMS if SPEED in one.columns)
        raise ValueError(f"--plans is for tables {tables}, which have speeds; not for {item.name}")
    others = ("output", "small", "emulate", "show", "evaluate", "schedules", "methods", "seeds")
    if given := [f"--{name}" for name in others if getattr(options, name)]:
        raise ValueError(f"--plans shows plans and runs nothing; leave out {', '.join(given)}")
    (study,) = item.studies
    print(f"planned from {', '.join(map(str, options.plans))}")
    print(plans_beside(study, read_plans(options.plans, study.max_freeze_ratio)))
    return 0


def _needs(item: Item, evaluate: str | None, keys: Sequence[str]) -> str:
    """Return an item's requirements, duration of its runs, and commands."""
    lines = [f"{item.name}: {item.title}"]
    for study in item.studies:
        files = study.settings()
        training = files["training"]
        folder = files["model"].get("hf_assets_path", "random weights")
        rows = training.get("dataset_path", f"{training['dataset']}, from the hub")
        words = study.command(Path("OUTPUT"), evaluate, keys)
        if study.is_emulated:
            # One device for all ranks has the work of all, but nothing to wait for.
            devices = f"one, for {study.n_ranks} emulated ranks"
            hours = ", minutes" if study.is_small else ""
        else:
            devices = f"{study.hardware}; or one, with --emulate"
            hours = f", {study.hours():.2g} hours by the paper's speed"
        lines += [
            "",
            f"devices  {devices}",
            f"model    {folder} (another: -- --model.hf_assets_path=FOLDER)",
            f"rows     {rows} (others: -- --training.dataset_path=FILE)",
            f"takes    {study.n_runs} runs{hours}",
            f"runs     timelyfreeze compare {shlex.join(words)}",
        ]
        if study.profiled:
            lines.append(f"cut by   the first bounds.json in OUTPUT/{study.profiled}")
    if len({study.folder for study in item.studies}) < len(item.studies):
        lines += ["", "what stands in several of these is run once"]
    if evaluate is None and item.shows_accuracy:
        lines += ["", "accuracies come with --evaluate OPTIONS"]
    return "\n".join(lines)
