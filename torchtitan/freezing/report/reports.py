"""The reports of a run: report.txt, what freezing brought, and report.md, the page on all of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template

from timelyfreeze.policies import LORA, freezes_by_turns
from timelyfreeze.records import (
    SUMMARY_FILE,
    FrozenCount,
    RunSummary,
    as_shown,
    kappa_of_cap,
    summary_to_json,
)
from timelyfreeze.timing import range_of, within
from torchtitan.freezing.report.parts import Run, RunPart
from torchtitan.freezing.report.run_folder import REPORT
from torchtitan.freezing.report.steps import Counts, Moves, TimedMove

_FREEZES, _FREEZES_NOT, _HAS_PLAN = "freezes", "freezes not", "no failure"

# Lines of the report: label, text, and of which runs alone they are; see ``filled`` for the text.
_LINES = (
    ("ended early", "{ended_early}"),
    ("emulated", "{emulated_ranks} ranks in one process; times are those of a device for each "
     "rank, without communication"),
    ("{unit}/s per device", "{tokens_per_second}", _FREEZES_NOT),
    ("too few steps to measure", "{unknown_speed}", _FREEZES_NOT),
    ("time to a loss", "{time_to_loss} of that without freezing, estimated: a step takes "
     "{time_of_step}[ +- {kappa_error}] of the time, and about {steps_factor} times as many are "
     "needed", _FREEZES),
    ("without freezing", "{tokens_per_second_unfrozen} {unit}/s per device, "
     "{step_ms_unfrozen} a step", _FREEZES),
    ("with freezing", "{tokens_per_second} {unit}/s per device, {step_ms} a step", _FREEZES),
    ("gain", "{gain} throughput", _FREEZES),
    ("freezing switched off", "{switched_off}", _FREEZES),
    ("since then", "{step_ms_off} a step", _FREEZES),
    ("no freeze plan", "{failure}", _FREEZES),
    ("batch without freezing", "{batch_unfrozen}", _HAS_PLAN),
    ("batch with freezing", "{batch}", _HAS_PLAN),
    ("step with freezing", "{step}; {outside_ms} outside of batches", _HAS_PLAN),
    ("predictions hold for", "{predicts_for}; {within}", _HAS_PLAN),
    ("speed of the machine", "forwards took {drift} times as long as when they were measured",
     _HAS_PLAN),
    ("upper bound", "{all_frozen_batch_ms} a batch with everything frozen "
     "({upper_bound_gain}); the plan reaches {planned_gain}", _HAS_PLAN),
    ("planned freeze ratio", "{planned_of_stages}", _HAS_PLAN),
    ("applied in the last step", "{applied_of_stages}", _HAS_PLAN),
    ("average freeze ratio", "{average_freeze_ratio} over all steps[{with_measuring}]", _HAS_PLAN),
    ("activation cache", "{cache_entered} of {cache_batches} batches began behind the frozen "
     "front; {cache_mib} kept; {cache_spent_ms} spent[, about {cache_saved_ms} saved]", _HAS_PLAN),
    ("kappa / p_eff", "{s.kappa:.2f} / {s.p_eff:.2f} = {kappa_over_p_eff}, the time to a loss as "
     "the paper estimates it (Eq. 13)", _HAS_PLAN),
    ("tokens", "{without_padding}"),
    ("moved", "{moved} times, {moves_seconds} in all"),
    ("cost", "{cost} for {device_seconds} device-seconds"),
    ("trained", "{parameters_trained} of {parameters} parameters, by {method}"),
    ("MFU", "{mfu_percent} of {peak_tflops} TFLOP/s[, without freezing {mfu_percent_unfrozen}]"),
    ("as run on one device", "{real_tokens_per_second} {unit}/s, {real_step_ms} a step"
     # On one thread that is processor time: other processes of the machine make steps longer.
     "[; the work of a batch took {real_batch_ms}]"),
    ("validation loss", "{validation_loss}"),
    ("validation top-1", "{validation_top1}[, top-5 {validation_top5}]"),
    ("loss of the reference",
     "{reference_loss}, {reached}; the reference took {reference_seconds}"),
)  # fmt: skip

# What a terminal shows, the most important first; the file has all lines.
_SHOWN = (
    "ended early", "time to a loss", "no freeze plan", "freezing switched off", "with freezing",
    "gain", "batch with freezing", "predictions hold for", "batch without freezing",
    "validation loss", "validation top-1", "upper bound", "as run on one device",
)  # fmt: skip
_MOST_SHOWN = 7


class Report(RunPart):
    """Writes ``summary.json`` and the short report, and shows the most important of it."""

    def __init__(self, run: Run, moves: Moves) -> None:
        super().__init__(run)
        self._moves = moves

    def finish(self, summary: RunSummary) -> None:
        run = self.run
        text = render_report(summary, run.folder, self._moves.timed())
        run.write(SUMMARY_FILE, summary_to_json(summary))
        run.write(REPORT, text)
        if run.is_shown and not run.config.report.quiet:
            with suppress(OSError):  # a terminal that is gone: the files tell
                print(shown_report(text), flush=True)


def shown_report(text: str) -> str:
    """Return the 8 lines of a report that a terminal shows, in the report's order."""
    title, lines = text.split("\n", 3)[:3], text.splitlines()[3:]
    if len(lines) <= _MOST_SHOWN + 1:
        return text
    by_label = {line[:24].rstrip(): line for line in lines}
    labels = [label for label in _SHOWN if label in by_label][: _MOST_SHOWN - 1]
    kept = [line for line in lines if line[:24].rstrip() in (*labels, "files")]
    more = f"{'all of it':<24} report.md and report.txt there"
    return "\n".join([*title, *kept, more]) + "\n"


def render_report(summary: RunSummary, run_folder: Path, moves: Sequence[TimedMove] = ()) -> str:
    """Return the report of a run; a line whose metrics are missing is left out or says so."""
    values = shown_values(summary)
    if not moves:
        values.pop("moved", None)
    freezes = freezes_by_turns(summary.method)
    shows = {
        _FREEZES: freezes,
        _FREEZES_NOT: not freezes,
        _HAS_PLAN: freezes and summary.failure is None,
    }
    lines: list[tuple[str, str | None]] = []
    for label, form, *of in _LINES:
        if all(shows[runs] for runs in of):
            lines.append((label.format_map(values), filled(form, values)))
        if label == "moved":
            lines += [(f"  step {each.move.step}", move_text(each)) for each in moves]
    lines.append(("files", str(run_folder)))
    lines.append(("TensorBoard", f"tensorboard --logdir {run_folder.parent}"))
    text = "".join(f"{label:<24} {line}".rstrip() + "\n" for label, line in lines if line)
    return f"\nRun report\n----------\n{text}"


def filled(form: str, values: Mapping[str, Any]) -> str | None:
    """Return a form of ``str.format`` with values; None, or without a [part], if one is unknown."""
    parts: list[str] = []
    for plain, optional in re.findall(r"([^][]+)|\[([^][]+)\]", form):
        try:
            parts.append((plain or optional).format_map(values))
        except (KeyError, TypeError):  # a value is missing, or None
            if plain:
                return None
    return "".join(parts)


def shown_values(summary: RunSummary) -> dict[str, Any]:
    """Return what is known, and what follows, as shown; steps are by the virtual clock."""
    clock, factor = summary.by_virtual_clock(), summary.interval_factor
    as_run = as_shown(summary) if summary.emulated_ranks is not None else {}
    before_ms, after_ms = clock.step_ms_unfrozen, clock.step_ms
    total, of_steps = summary.time_to_loss, summary.steps_factor
    leaves_padding = summary.counts_padding is False and summary.unit == "tokens"
    known = as_shown(clock)
    reached = known.get("seconds_to_reference_loss")
    found = {
        **known,
        "s": summary,
        "gain": f"{before_ms / after_ms - 1:+.1%}" if before_ms and after_ms else None,
        "time_of_step": f"{total / of_steps:.2f}" if total and of_steps else None,
        "unknown_speed": " " if clock.tokens_per_second is None else None,
        "batch_unfrozen": beside(
            summary.batch_ms_unfrozen, summary.batch_ms_unfrozen_predicted, factor
        ),
        "batch": beside(summary.batch_ms, summary.batch_ms_predicted, factor),
        "step": summary.step_ms_predicted and beside(after_ms, summary.step_ms_predicted),
        "within": within(factor),
        "planned_of_stages": _by_stage(summary.planned_stage_ratios),
        "applied_of_stages": _by_stage(summary.stage_ratios),
        "with_measuring": ", those that measure included" if summary.planned_stage_ratios else None,
        "without_padding": "without padding (report.count_padding)" if leaves_padding else None,
        "moved": summary.moves,
        "real_tokens_per_second": as_run.get("tokens_per_second"),
        "real_step_ms": as_run.get("step_ms"),
        "reached": f"reached after {reached}" if reached else "not reached",
    }
    return {name: value for name, value in found.items() if value is not None}


def move_text(timed: TimedMove) -> str:
    """Return what froze, to which pipeline a run moved for it, and what became of its steps."""
    move = timed.move
    frozen = "1 layer" if move.frozen_layers == 1 else f"{move.frozen_layers} layers"
    copies = "" if move.replicas == 1 else f", {move.replicas} replicas"
    ranks = "1 rank" if move.ranks == 1 else f"{move.ranks} ranks"
    before, after = (
        "unknown" if ms is None else f"{ms:,.1f} ms" for ms in (timed.before_ms, timed.after_ms)
    )
    return (
        f"{frozen} frozen: {ranks} with {move.split} layers{copies}, in {move.seconds:.1f} s; "
        f"a step {before} before, {after} since"
    )


def beside(
    measured_ms: float | None, predicted_ms: float | None, factor: float | None = None
) -> str:
    """Return a time as predicted, with its interval, and as measured."""
    measured = "not measured" if measured_ms is None else f"measured {measured_ms:,.1f} ms"
    if predicted_ms is None:
        return measured
    error = "" if measured_ms is None else f" ({measured_ms / predicted_ms - 1:+.1%})"
    interval = range_of(predicted_ms, factor)
    return f"predicted {predicted_ms:,.1f} ms{interval and f' ({interval})'}, {measured}{error}"


def _by_stage(ratios: Mapping[int, float] | None) -> str | None:
    if ratios is None:
        return None
    return "stage " + " ".join(f"{stage}: {ratio:.2f}" for stage, ratio in ratios.items())


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
    "max_freeze_ratio", "seed", "first_stage", "skip_input_grads", "min_gain",
)  # fmt: skip
_FILES = {
    "report.txt": "the short report, of which a terminal shows the most important",
    "summary.json": "all metrics of the run",
    "settings.json": "the whole configuration",
    "steps.csv": "every optimizer step",
    "losses.csv": "logged losses",
    "accuracies.csv": "top-1 and top-5 of each validation",
    "front.csv": "the frozen front in every step",
    "plasticity.csv": "evaluations of the frontmost live module",
    "moves.csv": "moves to other pipelines",
    "frozen_counts.csv": "how often each tensor was frozen",
    "responses.csv": "times of backwards, and what was frozen of them",
    "schedule.csv": "the order of actions",
    "bounds.json": "measured times of the actions",
    "plan.json": "what was solved",
}
_TEMPLATE = "report.md.j2"


class Page(RunPart):
    """Writes the page, which lists the files that are there, after all others are."""

    def __init__(self, run: Run, moves: Moves, counts: Counts) -> None:
        super().__init__(run)
        self._moves, self._counts = moves, counts

    def finish(self, summary: RunSummary) -> None:
        run, moves, counts = self.run, self._moves.timed(), self._counts.rows
        page = render_page(summary, run.config.to_dict(), run.folder, counts, moves)
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
    """Return the page as markdown, which lists the files that the folder has now."""
    method = "no freezing" if summary.method == "none" else summary.method
    return _template().render(
        title=", ".join([summary.model, summary.schedule or "no pipeline", method]),
        s=summary,
        shown=_Shown(shown_values(summary)),
        as_run=_Shown(as_shown(summary)),
        step_ms=summary.by_virtual_clock().step_ms,
        freezes=freezes_by_turns(summary.method),
        kappa=_kappa_of_batches(summary, settings),
        stages=_stages(summary, counts),
        moves=moves,
        settings=list(_settings(settings)),
        folder=run_folder,
        plots=sorted((run_folder / "plots").glob("*.png")),
        files=[(name, words) for name, words in _FILES.items() if (run_folder / name).exists()],
        traces=[file.name for file in sorted((run_folder / "plots").glob("trace*.json"))],
        has_tensorboard=any(run_folder.rglob("events.out.tfevents.*")),
    )


class _Shown(dict[str, Any]):
    """What is shown, by name; whatever else was not measured."""

    def __missing__(self, name: str) -> str:
        return "not measured"


@functools.cache
def _template() -> Template:
    """Return the page with places for what is said; made once, which takes a while."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A cell of a table has no line break, and no bar of its own.
        finalize=lambda value: str(value).replace("|", "\\|").replace("\n", " "),
    )
    templates.filters.update(number=_number, ms=_ms, beside=_beside)
    return templates.get_template(_TEMPLATE)


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
    return [
        {
            "stage": stage,
            "rank": ranks.get(stage, ""),
            "planned": planned.get(stage),
            "applied": applied.get(stage),
            "since": _frozen_ratio([count for count in counts if count.stage == stage]),
        }
        for stage in sorted({*planned, *applied, *ranks})
    ]


def _frozen_ratio(counts: Sequence[FrozenCount]) -> float | None:
    total = sum(count.elements * count.backwards for count in counts)
    return sum(count.elements * count.times_frozen for count in counts) / total if total else None


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SETTINGS:
        section, key = name.split(".")
        if (value := settings.get(section, {}).get(key)) not in (None, ""):
            yield name, str(value)
    freezing = settings.get("freezing", {})
    method = str(freezing.get("method", "none"))
    for key in _FREEZING_SETTINGS if freezes_by_turns(method) else ("method",):
        if key in freezing:
            yield f"freezing.{key}", str(freezing[key])
    name = method.removeprefix("timelyfreeze+")
    section = f"freezing.{name}"
    own = freezing.get(name)
    if method == LORA:
        section, own = LORA, settings.get(LORA)
    for key, value in own.items() if isinstance(own, Mapping) else ():
        yield f"{section}.{key}", str(value)


def _number(value: float | None, form: str, unit: str = "", unknown: str = "not measured") -> str:
    return unknown if value is None else f"{value:{form}}{unit}"


def _ms(value: float | None) -> str:
    return _number(value, ",.1f", " ms")


def _beside(
    measured_ms: float | None, predicted_ms: float | None, factor: float | None = None
) -> str:
    """Return a time as predicted, with its interval, and as measured; the latter alone as it is."""
    if predicted_ms is None:
        return _ms(measured_ms)
    return beside(measured_ms, predicted_ms, factor)
