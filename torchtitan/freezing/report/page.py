"""The page on a run, ``report.md``: what ran, what came out, and where its files are."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template

from timelyfreeze.policies import LORA, freezes_by_turns
from timelyfreeze.records import FrozenCount, RunSummary, as_shown, kappa_of_cap
from torchtitan.freezing.report.parts import Run, RunPart
from torchtitan.freezing.report.steps import Counts, Moves, TimedMove
from torchtitan.freezing.report.text import beside, by_virtual_clock, shown_values

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
        step_ms=by_virtual_clock(summary).step_ms,
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


# -- words -----------------------------------------------------------------------------------------


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
