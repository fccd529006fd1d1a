"""The page on a run, ``report.md``: what ran, what came out, and where its files are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from timelyfreeze.records import FrozenCount, RunSummary

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
    "report.txt": "the short report, as it was printed",
    "summary.json": "all metrics of the run",
    "settings.json": "the whole configuration",
    "steps.csv": "every optimizer step",
    "losses.csv": "logged losses",
    "frozen_counts.csv": "how often each tensor was frozen",
    "responses.csv": "times of backwards, and what was frozen of them",
    "schedule.csv": "the order of actions",
    "bounds.json": "measured times of the actions",
    "plan.json": "what was solved",
}
_UNKNOWN = "not measured"


def render_page(
    summary: RunSummary,
    settings: Mapping[str, Any],
    run_folder: Path,
    counts: Sequence[FrozenCount] = (),
) -> str:
    """Return the page as markdown; it lists the files that the folder has now.

    Args:
        summary: The run's metrics; what is None was not measured, and the page says so.
        settings: The configuration, by section and key.
        run_folder: Where the run's files are.
        counts: How often each tensor was frozen; empty without freezing.
    """
    parts = [
        [f"# {_title(summary)}", "", _first_words(summary)],
        ["## Outcome", "", *_table(("", ""), _outcome(summary))],
        _freezing(summary, counts),
        ["## Hardware", "", *_table(("", ""), _hardware(summary))],
        ["## Settings", "", *_table(("key", "value"), _settings(settings))],
        _plots(run_folder),
        ["## Files", "", *_files(run_folder)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _title(summary: RunSummary) -> str:
    words = [summary.model, summary.schedule or "no pipeline", summary.method]
    return ", ".join(words) if summary.method != "none" else ", ".join([*words[:2], "no freezing"])


def _first_words(summary: RunSummary) -> str:
    text = f"{summary.steps_done} of {summary.steps} steps, begun {summary.started_at}."
    if summary.emulated_ranks is not None:
        text += (
            f" Emulated: {summary.emulated_ranks} ranks ran in one process; times are those of a "
            "device for each rank, without communication, where not said otherwise."
        )
    if summary.ended_early is not None:
        text += f" It ended early: {summary.ended_early}."
    if summary.failure is not None:
        text += f" There is no freeze plan: {summary.failure}."
    if summary.switched_off is not None:
        text += f" Freezing was switched off {summary.switched_off}."
    return text


# -- outcome ---------------------------------------------------------------------------------------


def _outcome(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.method == "none":
        yield "tokens/s per device", _number(summary.tokens_per_second, ",.0f")
        yield "step", _ms(summary.step_ms)
    else:
        yield from _speed(summary)
    yield "training loss, last tenth of the steps", _number(summary.train_loss, ".4f")
    if summary.validation_loss is not None:
        yield "validation loss", f"{summary.validation_loss:.4f}"
    yield "seconds of training", _number(summary.seconds, ",.1f")
    yield "peak memory", _number(summary.peak_memory_gib, ".2f", " GiB")
    yield from _reference(summary)


def _speed(summary: RunSummary) -> Iterator[tuple[str, str]]:
    before_ms, after_ms = summary.step_ms_unfrozen, summary.step_ms
    before, after = summary.tokens_per_second_unfrozen, summary.tokens_per_second
    if summary.emulated_ranks is not None:
        yield "step as run on one device", f"{_ms(before_ms)}, with freezing {_ms(after_ms)}"
        before_ms, after_ms = summary.virtual_step_ms_unfrozen, summary.virtual_step_ms
        before = summary.virtual_tokens_per_second_unfrozen
        after = summary.virtual_tokens_per_second
    yield "tokens/s per device without freezing", _number(before, ",.0f")
    yield "with freezing", _number(after, ",.0f")
    gain = before_ms / after_ms - 1 if before_ms and after_ms else None
    yield "gain", _number(gain, "+.1%", " throughput")
    yield "step without freezing", _ms(before_ms)
    yield "step with freezing", _both(summary.step_ms_predicted, after_ms)
    yield (
        "batch without freezing",
        _both(summary.batch_ms_unfrozen_predicted, summary.batch_ms_unfrozen),
    )
    yield "batch with freezing", _both(summary.batch_ms_predicted, summary.batch_ms)
    if summary.drift is not None:
        yield (
            "speed of the machine",
            f"forwards took {summary.drift:.2f} times as long as when they were measured",
        )
    if summary.all_frozen_batch_ms is not None:
        yield (
            "upper bound, everything frozen",
            f"{summary.all_frozen_batch_ms:,.1f} ms a batch, "
            f"{_number(summary.upper_bound_gain, '+.1%')}; the plan promises "
            f"{_number(summary.planned_gain, '+.1%')}",
        )


def _reference(summary: RunSummary) -> Iterator[tuple[str, str]]:
    if summary.reference_run is None:
        return
    yield "reference run", f"`{summary.reference_run}`"
    if summary.reference_device not in (None, summary.device):
        yield "its device", f"{summary.reference_device}, another than this run's"
    yield (
        "its last training loss",
        f"{_number(summary.reference_loss, '.4f')}, after "
        f"{_number(summary.reference_seconds, ',.1f')} s",
    )
    reached = summary.seconds_to_reference_loss
    yield (
        "time to that loss",
        "not reached" if reached is None else f"{reached:,.1f} s of training",
    )


# -- freezing --------------------------------------------------------------------------------------


def _freezing(summary: RunSummary, counts: Sequence[FrozenCount]) -> list[str]:
    if summary.method == "none":
        return []
    rows = [
        (
            "mean of all masks, by elements",
            _number(summary.average_freeze_ratio, ".3f"),
        ),
        ("kappa: a step's time, of the unfrozen one", _number(summary.kappa, ".3f")),
        ("p_eff: fraction of the gradient energy that is updated", _number(summary.p_eff, ".3f")),
        (
            "kappa / p_eff: time to a loss, of the run without freezing",
            _number(summary.kappa_over_p_eff, ".2f"),
        ),
        ("tensors never updated since freezing began", _fraction(summary.never_updated_tensors)),
        ("elements in them", _fraction(summary.never_updated_elements)),
    ]
    return ["## Freezing", "", *_table(("", ""), rows), *_stages(summary, counts)]


def _stages(summary: RunSummary, counts: Sequence[FrozenCount]) -> list[str]:
    """Return the table of stages; its ratios are by element."""
    planned, applied = summary.planned_stage_ratios or {}, summary.stage_ratios or {}
    since = {stage: _frozen_ratio(counts, stage) for stage in {count.stage for count in counts}}
    ranks = {count.stage: str(count.rank) for count in counts}
    stages = sorted({*planned, *applied, *since})
    if not stages:
        return []
    rows = [
        (
            str(stage),
            ranks.get(stage, ""),
            _number(planned.get(stage), ".2f", unknown="no plan"),
            _number(applied.get(stage), ".2f"),
            _number(since.get(stage), ".2f"),
        )
        for stage in stages
    ]
    head = ("stage", "rank", "planned freeze ratio", "applied in the last step", "since it began")
    return ["", *_table(head, rows)]


def _frozen_ratio(counts: Sequence[FrozenCount], stage: int) -> float | None:
    of_stage = [count for count in counts if count.stage == stage]
    total = sum(count.elements * count.backwards for count in of_stage)
    return sum(count.elements * count.times_frozen for count in of_stage) / total if total else None


# -- what ran --------------------------------------------------------------------------------------


def _hardware(summary: RunSummary) -> Iterator[tuple[str, str]]:
    yield "device", summary.device
    yield "processes", str(summary.n_devices)
    yield "processes that share a batch", str(summary.ranks_per_replica)
    yield "torch", summary.torch_version


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SETTINGS:
        section, key = name.split(".")
        if (value := settings.get(section, {}).get(key)) not in (None, ""):
            yield name, str(value)
    freezing = settings.get("freezing", {})
    method = str(freezing.get("method", "none"))
    for key in _FREEZING_SETTINGS if method != "none" else ("method",):
        if key in freezing:
            yield f"freezing.{key}", str(freezing[key])
    policy = freezing.get(method.removeprefix("timelyfreeze+"))
    for key, value in policy.items() if isinstance(policy, Mapping) else ():
        yield f"freezing.{method.removeprefix('timelyfreeze+')}.{key}", str(value)


def _plots(run_folder: Path) -> list[str]:
    plots = sorted((run_folder / "plots").glob("*.png"))
    lines = ["## Plots", ""]
    if not plots:
        lines.append("None yet.")
    for plot in plots:
        name = plot.stem.replace("_", " ")
        lines.append(f"![{name}](plots/{plot.name})\n")
    lines.append(f"Drawn again from the files by `python -m timelyfreeze draw {run_folder}`.")
    return lines


def _files(run_folder: Path) -> Iterator[str]:
    for name, words in _FILES.items():
        if (run_folder / name).exists():
            yield f"- [{name}]({name}): {words}"
    for file in sorted((run_folder / "plots").glob("trace*.json")):
        yield f"- [{file.name}](plots/{file.name}): a trace for ui.perfetto.dev"
    if any(run_folder.rglob("events.out.tfevents.*")):
        yield f"- TensorBoard: `tensorboard --logdir {run_folder.parent}`"


# -- words -----------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def _number(value: float | None, form: str, unit: str = "", *, unknown: str = _UNKNOWN) -> str:
    return unknown if value is None else f"{value:{form}}{unit}"


def _fraction(value: float | None) -> str:
    return _number(value, ".1%", unknown="freezing has not begun")


def _ms(value: float | None) -> str:
    return _number(value, ",.1f", " ms")


def _both(predicted_ms: float | None, measured_ms: float | None) -> str:
    """Return a time as predicted and as measured."""
    if predicted_ms is None:
        return _ms(measured_ms)
    if measured_ms is None:
        return f"predicted {_ms(predicted_ms)}, {_UNKNOWN}"
    error = measured_ms / predicted_ms - 1
    return f"predicted {_ms(predicted_ms)}, measured {_ms(measured_ms)} ({error:+.1%})"
