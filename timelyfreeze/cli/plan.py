"""The command ``timelyfreeze plan``: predicted gains of freezing, without a device."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from timelyfreeze.files.options import number, run_folder, status_of, whole
from timelyfreeze.schedule import MAX_CELLS
from timelyfreeze.settings import ALL_OR_NOTHING, AUTO, FIRST_STAGE_MODES, SKIP_INPUT_GRADS, USE
from timelyfreeze.whatif.answers import answer, measured_of
from timelyfreeze.whatif.bounds_file import BoundsFile, read_bounds_file
from timelyfreeze.whatif.fronts import answer_fronts
from timelyfreeze.whatif.grid import BEST_SPLIT, DEFAULT_SPLIT, Case, Grid, Split
from timelyfreeze.whatif.page import render_page
from timelyfreeze.whatif.partition import PARAMETERS, PARTITIONS, TIME
from timelyfreeze.whatif.report import best_of, first_sentence, front_report, plan_report
from timelyfreeze.whatif.trace_file import WEIGHT_SHARE, is_trace, read_trace_files

_MAX_MS = 1e15
_SPLITS = (DEFAULT_SPLIT, BEST_SPLIT, *PARTITIONS)
# What only a plan, or a step with its optimizer, depends on.
_OF_PLANS: tuple[str, ...] = (
    "r_max", "first_stage", "skip_input_grads", "batches", "outside_ms", "time_limit_s",
    "html",
)  # fmt: skip
PAPERS = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def main(arguments: Sequence[str]) -> int:
    """Plan the asked grid; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Options that the question asked has no use for.
    names: tuple[str, ...]
    if options.frozen_layers is None:
        names, why = ("shrink_by", "link_gb_per_s"), "needs --frozen-layers"
    else:
        names, why = _OF_PLANS, "is of plans, and --frozen-layers asks for none; leave one out"
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"argument --{name.replace('_', '-')}: it {why}")
    options.traces = any(map(is_trace, options.bounds))
    if not options.traces and options.weight_share != WEIGHT_SHARE:
        parser.error("argument --weight-share: it is of traces; a bounds file has measured it")
    if len(options.bounds) > 1 and not options.traces:
        for name in ("frozen_layers", "json", "csv", "html"):
            if getattr(options, name) is not None:
                parser.error(f"argument --{name.replace('_', '-')}: it takes one BOUNDS")
    return status_of(lambda: _plan(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze plan",
        description="Plans every combination of schedules, r_max, microbatches and splits from "
        "files of measured bounds, which training runs or the profile have saved, or from traces "
        "of PyTorch's profiler. Needs no device.",
    )
    milliseconds, positive = number(0.0, _MAX_MS), number(0.0, _MAX_MS, above=True)
    share = number(0.0, 1.0)
    parser.add_argument(
        "bounds", nargs="+", type=Path, metavar="BOUNDS",
        help="bounds.json of a run, or its folder; of several, such as runs with other ranks of "
        "gradients, the best is told. Or traces (.json, .json.gz) of any trainer with torch's "
        "pipelines, one of each pipeline rank",
    )  # fmt: skip
    add = parser.add_argument_group("the grid").add_argument
    add("--schedules", nargs="+", default=PAPERS, help="default: %(default)s")
    measured = "default: as many as were measured"
    add(
        "--r-max", nargs="+", default=[AUTO, 0.8], metavar="R",
        type=lambda text: AUTO if text == AUTO else share(text),
        help=f"caps; {AUTO}: the one that should reach a loss soonest; default: %(default)s",
    )  # fmt: skip
    add("--microbatches", nargs="+", type=whole(1), metavar="M", help=measured)
    add(
        "--splits", nargs="+", type=lambda text: text if text in _SPLITS else _layers(text),
        default=[DEFAULT_SPLIT], metavar="SPLIT",
        help=f"{DEFAULT_SPLIT}: as measured, or TorchTitan's cut for another number of stages; "
        f"{BEST_SPLIT}: the fastest without freezing; {', '.join(PARTITIONS)}: the largest rank "
        "has least of it; or layers of each stage, such as 9,8,8,7",
    )  # fmt: skip
    add = parser.add_argument_group("frozen fronts in the place of plans").add_argument
    add(
        "--frozen-layers", nargs="+", type=whole(1), metavar="K",
        help="what the first K layers, frozen in every microbatch, bring: alone, with a cache, "
        "re-split, run ahead of, shrunk to fewer ranks",
    )  # fmt: skip
    add(
        "--shrink-by", choices=(PARAMETERS, TIME),
        help=f"what a shrunk pipeline balances; default: {PARAMETERS}, as PipeTransformer does, "
        f"if the file tells them, else {TIME}",
    )  # fmt: skip
    add(
        "--link-gb-per-s", type=positive, metavar="GB/S",
        help="bandwidth between replicas of a shrunk pipeline: what the gradients that they send "
        "each other take",
    )  # fmt: skip
    add = parser.add_argument_group("what the file may not say").add_argument
    add("--ranks", type=whole(2), metavar="N", help="pipeline ranks")
    add("--layers", type=_layers, metavar="SPLIT", help="layers of each measured stage")
    add(
        "--first-stage", choices=FIRST_STAGE_MODES,
        help=f"as freezing.first_stage; default: as the file says, or {ALL_OR_NOTHING}",
    )  # fmt: skip
    add(
        "--skip-input-grads", choices=SKIP_INPUT_GRADS,
        help=f"as freezing.skip_input_grads; default: as the file says, or {USE}",
    )  # fmt: skip
    add(
        "--weight-share", type=share, default=WEIGHT_SHARE, metavar="R",
        help="of traces: part of a full backward that gradients of weights take; default: "
        "%(default)s, as profiles of small Llamas have",
    )  # fmt: skip
    add = parser.add_argument_group("the machine and the step").add_argument
    add(
        "--processors", type=positive, metavar="N",
        help="ranks that compute at once, where they share a CPU's cores; default: as the file "
        "says, or all",
    )  # fmt: skip
    add(
        "--p2p-overhead-ms", type=milliseconds, default=0.0, metavar="MS",
        help="overhead of a message between ranks, added to what was measured: a training run on "
        "real ranks measures it, a profile does not",
    )  # fmt: skip
    batches = "pipeline batches in an optimizer step"
    add("--batches", type=whole(1), default=1, metavar="N", help=batches)
    add(
        "--outside-ms", type=milliseconds, metavar="MS",
        help="time of a step outside of its batches: optimizer, clipping, data; default: as "
        "measured for each batch",
    )  # fmt: skip
    limit = "for the solver, each case"
    add("--time-limit-s", type=positive, default=60.0, metavar="S", help=limit)
    add = parser.add_argument_group("files").add_argument
    add("--json", type=Path, metavar="FILE", help="everything, for programs")
    add("--csv", type=Path, metavar="FILE", help="a row for each case")
    add("--html", type=Path, metavar="FILE", help="one page, with timelines before and after")
    return parser


def _plan(options: argparse.Namespace) -> int:
    cases: list[Case] = []
    texts: list[str] = []
    layers, n_frozen = options.layers, options.frozen_layers
    for file in _files(options):
        grid = _grid(options, file)
        if n_frozen is None:
            planned = answer(file, grid, layers)
            cases += planned.cases
            report = plan_report(planned, file, grid)
        else:
            partition = options.shrink_by
            fronts = answer_fronts(file, grid, n_frozen, partition=partition, layers=layers)
            report = front_report(fronts, file, grid)
        texts.append(report.text())
    above = best_of(cases) if cases else []
    if len(texts) == 1 and cases and (measured := measured_of(file, grid, layers)):
        above.insert(0, first_sentence(measured, cases))
    print("\n".join([*above, "\n\n".join(texts)]))
    if options.html is not None:
        page = render_page(report, cases, file, grid, layers)
        options.html.write_text(page, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(report.json())
    if options.csv is not None:
        options.csv.write_text(report.csv())
    return 0


def _files(options: argparse.Namespace) -> Iterator[BoundsFile]:
    """Yield what is planned from: all traces are of one pipeline."""
    if options.traces:
        yield read_trace_files(options.bounds, options.weight_share)
        return
    for path in options.bounds:
        yield read_bounds_file(run_folder(path) / "bounds.json" if path.is_dir() else path)


def _grid(options: argparse.Namespace, file: BoundsFile) -> Grid:
    """Return the asked grid, completed from the file."""
    n_ranks = options.ranks or file.n_ranks
    if n_ranks is None or n_ranks < 2:
        raise ValueError(
            f"{file.path} does not say how many ranks its {file.n_stages} stages are on, or says "
            "1, and no schedule.csv lies beside it; tell with --ranks"
        )
    microbatches = tuple(options.microbatches or (file.n_microbatches,))
    if n_ranks * max(microbatches) > MAX_CELLS:
        raise ValueError(
            f"{n_ranks} ranks and {max(microbatches)} microbatches (--ranks, --microbatches): "
            f"their product must be at most {MAX_CELLS}"
        )
    outside_ms = options.outside_ms
    if outside_ms is None:
        outside_ms = options.batches * file.table.outside_ms
    return Grid(
        schedules=tuple(options.schedules),
        caps=tuple(options.r_max),
        microbatches=microbatches,
        splits=tuple(options.splits),
        n_ranks=n_ranks,
        first_stage=options.first_stage or file.metadata.first_stage or ALL_OR_NOTHING,
        skip_input_grads=options.skip_input_grads or file.metadata.skip_input_grads or USE,
        n_processors=options.processors or file.metadata.processors,
        p2p_overhead_ms=options.p2p_overhead_ms,
        link_gb_per_s=options.link_gb_per_s,
        batches=options.batches,
        outside_ms=outside_ms,
        time_limit_s=options.time_limit_s,
    )


def _layers(text: str) -> Split:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is given; layers of each stage are whole numbers with commas in between, "
            f"such as 9,8,8,7 (--splits also takes {', '.join(_SPLITS)})"
        )
    return tuple(map(int, words))
