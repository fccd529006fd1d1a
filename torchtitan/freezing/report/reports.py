"""The reports of a run: report.txt, the gains of freezing, and report.md, the whole page."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template, Undefined

from timelyfreeze.policies import LORA, freezes_by_turns
from timelyfreeze.records.convergence import kappa_of_cap
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary, as_shown, summary_to_json
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.timing import range_of, within
from torchtitan.freezing.report.parts import RunPart
from torchtitan.freezing.report.run_folder import REPORT
from torchtitan.freezing.report.steps import TimedMove, timed_moves

# What a terminal shows, the most important first; the file has all lines.
_SHOWN = (
    "ended early", "adapters first", "time to a loss", "speed has changed", "padding",
    "no freeze plan", "freezing switched off",
    "with freezing", "gain", "batch with freezing", "predictions hold for",
    "batch without freezing", "validation loss", "validation top-1", "upper bound",
    "as run on one device",
)  # fmt: skip
_MOST_SHOWN = 7
_NOTE = "note"


class Report(RunPart):
    """Writes ``summary.json`` and the short report, and shows its main lines."""

    def finish(self, summary: RunSummary) -> None:
        run = self.run
        text = render_report(summary, run.folder, timed_moves(run))
        if note := run.config.report.note:
            text += f"{_NOTE:<24} {note}\n"
        run.write(SUMMARY_FILE, summary_to_json(summary))
        run.write(REPORT, text)
        if run.is_shown and not run.config.report.quiet:
            with suppress(OSError):  # a terminal that is gone: the files tell
                print(shown_report(text), flush=True)


def shown_report(text: str) -> str:
    """Return the 8 lines of a report for a terminal, in the report's order, and its note."""
    title, lines = text.split("\n", 3)[:3], text.splitlines()[3:]
    if len(lines) <= _MOST_SHOWN + 1:
        return text
    by_label = {line[:24].rstrip(): line for line in lines}
    labels = [label for label in _SHOWN if label in by_label][: _MOST_SHOWN - 1]
    kept = [line for line in lines if line[:24].rstrip() in (*labels, "files")]
    more = f"{'all of it':<24} report.md and report.txt there"
    notes = [line for line in lines[-1:] if line.startswith(_NOTE)]
    return "\n".join([*title, *kept, more, *notes]) + "\n"


def render_report(summary: RunSummary, run_folder: Path, moves: Sequence[TimedMove] = ()) -> str:
    """Return the report of a run; a line whose metrics are missing is left out or says so."""
    unknown = "\0"
    text = _template("report.txt.j2", unknown).render(_known(summary, run_folder, moves))
    return "".join(f"{line}\n" for line in text.splitlines() if unknown not in line)


def _known(summary: RunSummary, run_folder: Path, moves: Sequence[TimedMove]) -> dict[str, Any]:
    """Return the common data of both reports; steps are by the virtual clock."""
    clock = summary.by_virtual_clock()
    shown = as_shown(clock)
    if clock.step_ms_unfrozen and clock.step_ms:
        kappa = clock.step_ms / clock.step_ms_unfrozen
        shown["gain"] = f"{1 / kappa - 1:+.1%}"
        if clock.control_steps and clock.kappa_error is not None:
            shown["gain"] += f" +- {clock.kappa_error / kappa**2:.1%}"
    return {
        "s": summary,
        "clock": clock,
        "shown": shown,
        "as_run": as_shown(summary),
        "within": within(summary.interval_factor),
        "freezes": freezes_by_turns(summary.method.removeprefix(f"{LORA}+")),
        "moves": moves,
        "folder": run_folder,
    }


@functools.cache
def _template(name: str, unknown: str) -> Template:
    """Return a cached template; ``unknown`` replaces missing values."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=type("Unknown", (Undefined,), {"__str__": lambda _: unknown}),
        # A cell of a table has no line break, and no bar of its own.
        finalize=(lambda value: str(value).replace("|", "\\|").replace("\n", " "))
        if name.endswith(".md.j2")
        else None,
    )
    ms = functools.partial(_number, form=",.1f", unit=" ms")
    templates.filters.update(number=_number, ms=ms, beside=beside)
    return templates.get_template(name)


def beside(
    measured_ms: float | None,
    predicted_ms: float | None,
    factor: float | None = None,
    drift: float | None = None,
) -> str:
    """Return a time as predicted, with its interval, and as measured.

    With forwards ``drift`` times as long as when timed, the error is told without the drift too:
    predictions assume the machine's speed.
    """
    measured = "not measured" if measured_ms is None else f"measured {measured_ms:,.1f} ms"
    if predicted_ms is None:
        return measured
    error = "" if measured_ms is None else f" ({measured_ms / predicted_ms - 1:+.1%}"
    if measured_ms is not None and drift:
        error += f"; {measured_ms / drift / predicted_ms - 1:+.1%} at the speed of then"
    error += error and ")"
    interval = range_of(predicted_ms, factor)
    return f"predicted {predicted_ms:,.1f} ms{interval and f' ({interval})'}, {measured}{error}"


# -- the page --------------------------------------------------------------------------------------

# Keys that tell runs apart at a glance; settings.json has all.
_SETTINGS = (
    "model.name", "model.flavor", "training.dataset", "training.dataset_path",
    "training.local_batch_size", "training.global_batch_size", "training.seq_len",
    "training.steps", "training.mixed_precision_param", "optimizer.name", "optimizer.lr",
    "lr_scheduler.warmup_steps", "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_microbatch_size", "parallelism.data_parallel_shard_degree",
    "activation_checkpoint.mode", "debug.seed", "data.seed", "emulation.enable",
)  # fmt: skip
_FREEZING_SETTINGS = (
    "method", "last_warmup_step", "last_monitor_step", "monitoring", "last_ramp_step",
    "max_freeze_ratio", "gradient_rank", "seed", "first_stage", "skip_input_grads", "min_gain",
)  # fmt: skip


class Page(RunPart):
    """Writes the page, with a list of files, after all others are there."""

    def finish(self, summary: RunSummary) -> None:
        run, settings = self.run, self.run.config.to_dict()
        page = render_page(summary, settings, run.folder, run.frozen_counts, timed_moves(run))
        run.write("report.md", page)
        if run.is_shown and run.config.report.quiet:
            print(f"report: {run.folder / 'report.md'}", flush=True)


def render_page(
    summary: RunSummary,
    settings: Mapping[str, Any],
    run_folder: Path,
    counts: Sequence[FrozenCount] = (),
    moves: Sequence[TimedMove] = (),
) -> str:
    """Return the page as markdown, with a list of the folder's files."""
    method = "no freezing" if summary.method == "none" else summary.method
    return _template("report.md.j2", "not measured").render(
        _known(summary, run_folder, moves),
        title=", ".join([summary.model, summary.schedule or "no pipeline", method]),
        kappa=_kappa_of_batches(summary, settings),
        stages=_stages(summary, counts),
        settings=list(_settings(settings)),
        plots=sorted((run_folder / "plots").glob("*.png")),
        traces=[file.name for file in sorted((run_folder / "plots").glob("trace*.json"))],
        has_tensorboard=any(run_folder.rglob("events.out.tfevents.*")),
    )


def _kappa_of_batches(summary: RunSummary, settings: Mapping[str, Any]) -> str:
    """Return how much shorter batches are: by the cap alone (Eq. 50), planned, and measured."""
    before_ms, frozen_ms = summary.batch_ms_unfrozen_predicted, summary.all_frozen_batch_ms
    cap = settings.get("freezing", {}).get("max_freeze_ratio")
    if not before_ms or frozen_ms is None or isinstance(cap, str) or cap is None:
        return ""
    found = [
        (f"by r_max {cap:g} alone", kappa_of_cap(cap, frozen_ms, before_ms)),
        ("planned", summary.batch_ms_predicted and summary.batch_ms_predicted / before_ms),
        ("measured", summary.batch_ms and summary.batch_ms_unfrozen
         and summary.batch_ms / summary.batch_ms_unfrozen),
    ]  # fmt: skip
    return ", ".join(f"{words} {value:.3f}" for words, value in found if value)


def _stages(summary: RunSummary, counts: Sequence[FrozenCount]) -> list[dict[str, Any]]:
    """Return the table of stages; its ratios are by element."""
    planned, applied = summary.planned_stage_ratios or {}, summary.stage_ratios or {}
    ranks = {count.stage: count.rank for count in counts}
    ran, frozen = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    for count in counts:
        ran[count.stage] += count.elements * count.backwards
        frozen[count.stage] += count.elements * count.times_frozen
    return [
        {
            "stage": stage,
            "rank": ranks.get(stage, ""),
            "planned": planned.get(stage),
            "applied": applied.get(stage),
            "since": frozen[stage] / ran[stage] if ran.get(stage) else None,
        }
        for stage in sorted({*planned, *applied, *ranks})
    ]


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SETTINGS:
        section, key = name.split(".")
        if (value := settings.get(section, {}).get(key)) not in (None, ""):
            yield name, str(value)
    freezing = settings.get("freezing", {})
    method = str(freezing.get("method", "none"))
    keys = _FREEZING_SETTINGS if freezes_by_turns(method) else ("method",)
    yield from ((f"freezing.{key}", str(freezing[key])) for key in keys if key in freezing)
    metric = method.removeprefix("timelyfreeze+")
    section, own = f"freezing.{metric}", freezing.get(metric)
    if method == LORA or settings.get(LORA, {}).get("until"):
        section, own = LORA, settings.get(LORA)
    if isinstance(own, Mapping):
        yield from ((f"{section}.{key}", str(value)) for key, value in own.items())


def _number(value: float | None, form: str, unit: str = "", unknown: str = "not measured") -> str:
    return unknown if value is None else f"{value:{form}}{unit}"
