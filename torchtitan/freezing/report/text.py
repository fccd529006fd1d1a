"""The short report at the end of a run: what freezing brought, and whether the prediction held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.records import RunSummary
from timelyfreeze.timing import range_of, within
from torchtitan.freezing.report.step_record import TimedMove

# Lines of the report by their label; None for what is not known, which is left out.
_Lines = dict[str, str | None]


# What a terminal shows, the most important first; the file has all lines.
_SHOWN = (
    "ended early", "time to a loss", "no freeze plan", "freezing switched off", "with freezing",
    "gain", "batch with freezing", "predictions hold for", "batch without freezing",
    "validation loss", "validation top-1", "upper bound", "as run on one device",
)  # fmt: skip
_MOST_SHOWN = 7


def shown_report(text: str) -> str:
    """Return what a terminal shows of a report: 8 lines at most, in the report's order.

    That is what freezing brought, whether the prediction held, and where the files are. A run
    that says little shows all of it.
    """
    title, lines = text.split("\n", 3)[:3], text.splitlines()[3:]
    if len(lines) <= _MOST_SHOWN + 1:
        return text
    by_label = {line[:24].rstrip(): line for line in lines}
    labels = [label for label in _SHOWN if label in by_label][: _MOST_SHOWN - 1]
    kept = [line for line in lines if line[:24].rstrip() in (*labels, "files")]
    more = f"{'all of it':<24} report.md and report.txt there"
    return "\n".join([*title, *kept, more]) + "\n"


def render_report(summary: RunSummary, run_folder: Path, moves: Sequence[TimedMove] = ()) -> str:
    """Return the report of a run.

    Args:
        summary: The run's metrics; a line whose metrics are missing is left out or says so.
        run_folder: Where the run's files are.
        moves: To other pipelines.
    """
    clock = by_virtual_clock(summary)
    leaves_padding = summary.counts_padding is False and summary.unit == "tokens"
    lines: _Lines = {
        "ended early": summary.ended_early,
        "emulated": _known(
            "{} ranks in one process; times are those of a device for each rank, without "
            "communication",
            summary.emulated_ranks,
        ),
        **(_frozen_run(clock) if freezes_by_turns(summary.method) else _unfrozen_run(clock)),
        "tokens": "without padding (report.count_padding)" if leaves_padding else None,
        **_moves(summary, moves),
        "cost": _known("{:,.2f} for {:,.1f} device-seconds", summary.cost, summary.device_seconds),
        "trained": _trained(summary),
        "MFU": _utilization(summary),
        "as run on one device": _on_one_device(summary),
        "validation loss": _known("{:.4f}", summary.validation_loss),
        "validation top-1": _accuracy(summary),
        "loss of the reference": _reference(summary),
        "files": str(run_folder),
        "TensorBoard": f"tensorboard --logdir {run_folder.parent}",
    }
    text = "".join(f"{label:<24} {line}".rstrip() + "\n" for label, line in lines.items() if line)
    return f"\nRun report\n----------\n{text}"


def _moves(summary: RunSummary, moves: Sequence[TimedMove]) -> _Lines:
    lines: _Lines = {
        f"  step {timed.move.step}": f"{move_text(timed)}; {_step_change(timed)}" for timed in moves
    }
    if not moves:
        return {}
    return {
        "moved": _known("{} times, {:.1f} s in all", summary.moves, summary.moves_seconds),
        **lines,
    }


def move_text(timed: TimedMove) -> str:
    """Return what froze, and to which pipeline a run moved for it."""
    move = timed.move
    frozen = "1 layer" if move.frozen_layers == 1 else f"{move.frozen_layers} layers"
    copies = "" if move.replicas == 1 else f", {move.replicas} replicas"
    ranks = "1 rank" if move.ranks == 1 else f"{move.ranks} ranks"
    return f"{frozen} frozen: {ranks} with {move.split} layers{copies}, in {move.seconds:.1f} s"


def _step_change(timed: TimedMove) -> str:
    times = [_known("{:,.1f} ms", ms) or "unknown" for ms in (timed.before_ms, timed.after_ms)]
    return f"a step {times[0]} before, {times[1]} since"


def _trained(summary: RunSummary) -> str | None:
    """Say how many parameters learn where the others are frozen for good."""
    form = "{:,} of {:,} parameters, by " + summary.method
    return _known(form, summary.parameters_trained, summary.parameters)


def _utilization(summary: RunSummary) -> str | None:
    before = _known(", without freezing {:.2f}%", summary.mfu_percent_unfrozen) or ""
    own = _known("{:.2f}% of {:.4g} TFLOP/s", summary.mfu_percent, summary.peak_tflops)
    return own and own + before


def by_virtual_clock(summary: RunSummary) -> RunSummary:
    """Return the summary with the steps of an emulated run as devices would have taken them."""
    if summary.emulated_ranks is None:
        return summary
    names = ("tokens_per_second_unfrozen", "tokens_per_second", "step_ms_unfrozen", "step_ms")
    virtual = {name: getattr(summary, f"virtual_{name}") for name in (*names, "step_ms_off")}
    return replace(summary, **virtual)


def _known(form: str, *values: Any) -> str | None:
    """Return ``form`` with the values in it; None if one of them is not known."""
    return None if any(value is None for value in values) else form.format(*values)


def _on_one_device(summary: RunSummary) -> str | None:
    """Say what an emulation itself took."""
    if summary.emulated_ranks is None:
        return None
    form = f"{{:,.0f}} {summary.unit}/s, {{:.1f}} ms a step"
    step = _known(form, summary.tokens_per_second, summary.step_ms)
    # On one thread the latter is processor time: other processes of the machine make steps longer.
    batch = _known("; the work of a batch took {:.1f} ms", summary.real_batch_ms) or ""
    return step and step + batch


def _accuracy(summary: RunSummary) -> str | None:
    top5 = _known(", top-5 {:.2%}", summary.validation_top5) or ""
    top1 = _known("{:.2%}", summary.validation_top1)
    return top1 and top1 + top5


def _reference(summary: RunSummary) -> str | None:
    reached = _known("reached after {:,.1f} s", summary.seconds_to_reference_loss) or "not reached"
    form = f"{{:.4f}}, {reached}; the reference took {{:,.1f}} s"
    return _known(form, summary.reference_loss, summary.reference_seconds)


def _unfrozen_run(summary: RunSummary) -> _Lines:
    speed = _known("{:,.0f}", summary.tokens_per_second)
    return {f"{summary.unit}/s per device": speed} if speed else {"too few steps to measure": " "}


def _time_to_loss(summary: RunSummary) -> str | None:
    """Say what was estimated, and how much of it is the number of steps, the less certain part."""
    total, n_steps, error = summary.time_to_loss, summary.steps_factor, summary.kappa_error
    if total is None or n_steps is None:
        return None
    spread = "" if error is None else f" +- {error:.2f}"
    return (
        f"{total:.2f} of that without freezing, estimated: a step takes {total / n_steps:.2f}"
        f"{spread} of the time, and about {n_steps:.2f} times as many are needed"
    )


def _frozen_run(summary: RunSummary) -> _Lines:
    before_ms, after_ms = summary.step_ms_unfrozen, summary.step_ms
    speed = f"{{:,.0f}} {summary.unit}/s per device, {{:.1f}} ms a step"
    gain = before_ms / after_ms - 1 if before_ms is not None and after_ms is not None else None
    lines: _Lines = {
        "time to a loss": _time_to_loss(summary),
        "without freezing": _known(speed, summary.tokens_per_second_unfrozen, before_ms),
        "with freezing": _known(speed, summary.tokens_per_second, after_ms),
        "gain": _known("{:+.1%} throughput", gain),
        "freezing switched off": summary.switched_off,
        "since then": _known("{:.1f} ms a step", summary.step_ms_off),
    }
    if summary.failure is not None:
        return {**lines, "no freeze plan": summary.failure}
    factor = summary.interval_factor
    average = _known("{:.3f}", summary.average_freeze_ratio)
    measuring = ", those that measure included" if summary.planned_stage_ratios else ""
    step = _beside(summary.step_ms_predicted, after_ms)
    return {
        **lines,
        "batch without freezing": _beside(
            summary.batch_ms_unfrozen_predicted, summary.batch_ms_unfrozen, factor
        ),
        "batch with freezing": _beside(summary.batch_ms_predicted, summary.batch_ms, factor),
        "step with freezing": None
        if summary.step_ms_predicted is None
        else f"{step}; {summary.outside_ms:.1f} ms outside of batches",
        "predictions hold for": _known("{}; {}", summary.predicts_for, within(factor)),
        "speed of the machine": _known(
            "forwards took {:.2f} times as long as when they were measured", summary.drift
        ),
        "upper bound": _known(
            "{:.1f} ms a batch with everything frozen ({:+.1%}); the plan reaches {:+.1%}",
            summary.all_frozen_batch_ms,
            summary.upper_bound_gain,
            summary.planned_gain,
        ),
        "planned freeze ratio": _by_stage(summary.planned_stage_ratios),
        "applied in the last step": _by_stage(summary.stage_ratios),
        "average freeze ratio": average and f"{average} over all steps{measuring}",
        "activation cache": _cache(summary),
        "kappa / p_eff": _known(
            "{:.2f} / {:.2f} = {:.2f}; a loss is reached sooner with freezing if below 1",
            summary.kappa,
            summary.p_eff,
            summary.kappa_over_p_eff,
        ),
    }


def _cache(summary: RunSummary) -> str | None:
    """Say what reading the frozen front's output was good for."""
    told = _known(
        "{:,} of {:,} batches began behind the frozen front; {:,.0f} MiB kept; {:,.0f} ms spent",
        summary.cache_entered,
        summary.cache_batches,
        summary.cache_mib,
        summary.cache_spent_ms,
    )
    return told and told + (_known(", about {:,.0f} ms saved", summary.cache_saved_ms) or "")


def _beside(
    predicted_ms: float | None, measured_ms: float | None, factor: float | None = None
) -> str:
    measured = _known("measured {:.1f} ms", measured_ms) or "not measured"
    if predicted_ms is None:
        return measured
    error = "" if measured_ms is None else f" ({measured_ms / predicted_ms - 1:+.1%})"
    interval = range_of(predicted_ms, factor)
    return f"predicted {predicted_ms:.1f} ms{interval and f' ({interval})'}, {measured}{error}"


def _by_stage(ratios: Mapping[int, float] | None) -> str | None:
    if ratios is None:
        return None
    return "stage " + " ".join(f"{stage}: {ratio:.2f}" for stage, ratio in ratios.items())
