"""Makes runs over methods, schedules and seeds, and shows all of them side by side.

    timelyfreeze compare run CONFIG.toml OUTPUT --methods none timelyfreeze apf
        [--schedules GPipe 1F1B] --seeds 42 22 11 [--nproc 4] [--vary KEY=A,B,C ...]
        [--evaluate[="--limit 40 ..."]] [-- --training.steps=500 ...]
    timelyfreeze compare chain CONFIG.toml OUTPUT [--links plain packed ...] --seeds 42 22 11
        [--nproc 4] [--short 4] [--memory-gib 80] [-- --training.steps=500 ...]
    timelyfreeze compare show RUN [RUN ...] [--output FOLDER] [--reference RUN]

run   trains one after another, all methods of a schedule and seed in a row. What OUTPUT already has
      is not run again; a run that was killed goes on from its last checkpoint; what failed, or has
      none, starts again, and its old files move to OUTPUT/set_aside. Ends with the table of all
      runs in OUTPUT, which goes to comparison.md there as well, and single runs to comparison.csv.
      What follows -- goes to the trainer. Exit status 1 if a run failed. Besides values of
      freezing.method, --methods takes fewer_steps and fewer_microbatches: what a user would do
      without freezing in the time of each freezing method beside it. They run behind the methods,
      whose times they are fitted to. --vary makes runs of each value of a key of the configuration,
      of several keys of each pair of values. --evaluate scores each finished run with timelyfreeze
      evaluate and the options given, and the model before training in OUTPUT/base_model; what has
      its scores is left alone. Exit status 1 if that failed.
chain goes from TorchTitan's keys to ours, link by link: rows packed, logits of learned tokens
      alone, layers split by time, the best schedule, low-rank freezing or adapters. Each link runs
      beside the one before, with as many rows in a step, a turn for each seed, every second turn
      backwards. A run more measures times, by which split and schedule are chosen. OUTPUT gets the
      table (chain.md) and the waterfall (chain.png, chain.svg). Goes on as run does.
show  reads what runs wrote, wherever they were made: RUN is the folder of a run, or one with runs
      below it; every summary.json counts. Repeats, that is runs which differ in their seeds alone,
      are averaged. The table is printed. FOLDER gets comparison.html, a page that needs no other
      file, comparison.md, comparison.csv with all single runs, and each plot as PNG and SVG. Exit
      status 1 if there were runs that could not be read; all others are compared.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from timelyfreeze.cli.hub import config_table, value_of
from timelyfreeze.compare.chain import chain_figure, link_rows, render_chain
from timelyfreeze.compare.groups import Group, compare, group
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.plots import KINDS, plots
from timelyfreeze.compare.runs import jobs
from timelyfreeze.compare.runs.links import LINKS, chain_jobs, read_links, read_packed
from timelyfreeze.compare.runs.run import FoundRuns, Run, find_any, find_runs
from timelyfreeze.compare.runs.scoring import Scoring, parse_questions, scoring_errors
from timelyfreeze.compare.runs.sweep import errors, plan_jobs
from timelyfreeze.compare.runs.variants import PEERS, parse_variants
from timelyfreeze.compare.table import Table, render_csv, render_html, render_markdown, tabulate
from timelyfreeze.files import printable, write_whole
from timelyfreeze.files.options import number, parse_with_keys, status_of, whole
from timelyfreeze.plots import style
from timelyfreeze.records.tables import WINDOW

OUTPUT = Path("outputs/comparison")
TITLE = "Runs compared"


def main(arguments: Sequence[str], *, starter: jobs.Starter = jobs.start) -> int:
    """Run or show, and return the exit status."""
    options, keys = parse_with_keys(_parser(), arguments)

    def work() -> int:
        if options.window < 1:
            raise ValueError(f"--window is {options.window}; it must be 1 or more")
        if options.what == "run":
            return _run(options, tuple(keys), starter)
        if options.what == "chain":
            return _chain(options, tuple(keys), starter)
        if keys:
            raise ValueError(f"{' '.join(keys)}: show starts no trainer")
        return _show(options)

    with jobs.resumable():
        return status_of(work)


def keep(output: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write ``files``, names and contents, to the folder ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        write_whole(output / name, content.encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the runs, then the table")
    links = commands.add_parser("chain", help="from TorchTitan's keys to ours, link by link")
    for making in (run, links):
        add = making.add_argument
        add("config", type=Path, metavar="CONFIG", help="TOML file of all runs")
        add("output", type=Path, metavar="OUTPUT", help="folder of all runs")
        add("--seeds", nargs="+", type=int, default=[42])
        add("--nproc", type=int, metavar="N",
            help="processes of a run, and ranks of its pipeline (default: as many as CONFIG has "
            "ranks, and one where it emulates them)")  # fmt: skip
    add("--links", nargs="+", default=LINKS, metavar="LINK", help=f"default: {' '.join(LINKS)}")
    add("--short", type=whole(3), metavar="N",
        help="steps of links that freeze nothing, and of adapters: for times alone")  # fmt: skip
    add("--memory-gib", type=number(0.0, 1e6, above=True), metavar="GIB",
        help="memory that the best schedule has to fit into, on each device")  # fmt: skip
    add = run.add_argument
    methods = f"values of freezing.method, {' and '.join(PEERS)}"
    add("--methods", nargs="+", required=True, help=methods)
    add("--schedules", nargs="+", help="pipeline schedules (default: that of CONFIG)")
    add("--steps-factor", type=float, default=1.0, metavar="F",
        help="a run that freezes makes F times as many steps as none, to end at none's loss "
        "(default 1)")  # fmt: skip
    add("--vary", action="append", default=[], metavar="KEY=A,B,C",
        help="runs of each value, such as freezing.max_freeze_ratio=0.2,0.8; may be "
        "repeated")  # fmt: skip
    add("--evaluate", nargs="?", const="", metavar="OPTIONS",
        help="score runs and the model before training; options of timelyfreeze evaluate, as one "
        "text after =")  # fmt: skip
    show = commands.add_parser("show", help="table, plots and a page of runs that were made before")
    add = show.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN")
    where = f"where everything goes (default {OUTPUT})"
    add("--output", type=Path, metavar="FOLDER", help=where)
    alone = "the table alone, kept in a file only with --output"
    add("--table", action="store_true", help=alone)
    reference = "run whose last loss the others are to reach"
    add("--reference", type=Path, metavar="RUN", help=reference)
    add("--title", default=TITLE, help=f"of the page (default {TITLE!r})")
    links.set_defaults(window=WINDOW)
    for command in (run, show):
        words = f"logged losses in a running mean (default {WINDOW})"
        command.add_argument("--window", type=int, default=WINDOW, help=words)
    return parser


def _run(options: argparse.Namespace, arguments: tuple[str, ...], starter: jobs.Starter) -> int:
    settings, nproc, output = _place(options, arguments)
    table, key = config_table(settings.config), "parallelism.pipeline_parallel_schedule"
    schedules = options.schedules or [value_of(arguments, table, key) or "1F1B"]
    asked = plan_jobs(
        options.methods, schedules, options.seeds, nproc, options.steps_factor,
        parse_variants(options.vary),
    )  # fmt: skip
    found = errors(asked, settings)
    scoring = None
    if options.evaluate is not None:
        found += scoring_errors(settings)
        scoring = Scoring(parse_questions(options.evaluate), output, starter)
    if found:
        raise ValueError("\n       ".join(found))
    if scoring is not None:
        jobs.require_scorable(scoring.questions.arguments(output, output))
    jobs.require_startable(asked, settings, output)
    then = None if scoring is None else scoring.score
    failed = jobs.run_jobs(asked, settings, output, starter=starter, then=then)
    is_scored = scoring is None or scoring.score_base_model()
    print()
    _table(find_any([output]), output, Criteria(options.window))
    return 0 if is_scored and not failed else 1


def _place(
    options: argparse.Namespace, arguments: tuple[str, ...]
) -> tuple[jobs.Settings, int, Path]:
    """Return the settings of all runs, their number of processes, and their folder."""
    # The trainer starts in the repository, not where this command was started.
    settings = jobs.Settings(options.config.resolve(), arguments)
    emulates = settings.is_on("emulation.enable")  # one process does the work of all ranks
    if not emulates:
        settings = replace(settings, degree=options.nproc)
    own = 1 if emulates else settings.n_ranks
    nproc = own if options.nproc is None else options.nproc
    return settings, nproc, options.output.resolve()


def _chain(options: argparse.Namespace, arguments: tuple[str, ...], starter: jobs.Starter) -> int:
    settings, nproc, output = _place(options, arguments)
    links = read_links(options.links)
    packed = read_packed(settings)
    limits = {"n_steps": options.short, "memory_gib": options.memory_gib}
    asked = chain_jobs(links, options.seeds, settings, nproc, packed, **limits)
    if found := errors(asked, settings):
        raise ValueError("\n       ".join(found))
    jobs.require_startable(asked, settings, output)
    failed = jobs.run_jobs(asked, settings, output, starter=starter)
    rows = link_rows(links, output, options.seeds, packed)
    if not rows:
        raise ValueError(f"no link has a finished run in {output}")
    text = render_chain(rows, packed)
    print("\n" + text)
    keep(output, [("chain.md", text)])
    style.save(chain_figure(rows), output, "chain")
    return 1 if failed else 0


def _show(options: argparse.Namespace) -> int:
    """Write everything; return 1 if a run could not be read."""
    output = OUTPUT if options.output is None and not options.table else options.output
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"--output is {output}, which is no folder")
    found = find_any(options.runs)
    for problem in found.unreadable:
        print(printable(f"not read: {problem}"), file=sys.stderr)
    if not found.runs:
        raise ValueError("none of the runs can be read")
    criteria = Criteria(options.window, options.reference and _reference(options.reference))
    table, groups = _table(found, output, criteria)
    if not options.table:
        _page(table, groups, output, criteria, options.title)
        print(f"\nthe page: {output / 'comparison.html'}")
    return 1 if found.unreadable else 0


def _reference(folder: Path) -> Run:
    """Return the only run below ``folder``; an error for none or several."""
    found = find_runs([folder])
    if found.unreadable:
        raise ValueError(f"--reference cannot be read: {'; '.join(found.unreadable)}")
    if len(found.runs) != 1:
        raise ValueError(f"--reference {folder} holds {len(found.runs)} runs; name one of them")
    return found.runs[0]


def _table(found: FoundRuns, output: Path | None, criteria: Criteria) -> tuple[Table, list[Group]]:
    """Print the table, and keep table and single runs in ``output``."""
    compared = compare(found.runs, criteria)
    table = tabulate(compared, found, criteria)
    text = render_markdown(table, criteria)
    print(text, end="", flush=True)
    if output is not None:
        keep(output, [("comparison.md", text), ("comparison.csv", render_csv(compared))])
    return table, group(compared)


def _page(
    table: Table, groups: Sequence[Group], output: Path, criteria: Criteria, title: str
) -> None:
    """Draw all plots, and write the page and the Markdown with them."""
    # Plots that an earlier comparison left, of other runs, would mislead.
    ours = re.compile(rf"({'|'.join(KINDS)})(_\d+)?\.(png|svg)")
    for path in output.glob("*"):
        if ours.fullmatch(path.name):
            path.unlink()
    shown, images = [], {}
    for plot in plots(groups, criteria):
        shown.append(plot)
        if plot.figure is not None:
            png, _ = style.save(plot.figure, output, plot.name)
            images[plot.name] = png.read_bytes()
    page = render_html(title, table, groups, shown, images)
    text = render_markdown(table, criteria, shown)
    keep(output, [("comparison.html", page), ("comparison.md", text)])
