"""The metrics of a run, as in ``summary.json`` and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from timelyfreeze.files import read_dataclass, read_object, shown

SUMMARY_FILE = "summary.json"
_MS = "{:,.1f} ms"
_MUCH_PADDING = 0.1  # of all tokens
_OTHER_SPEED = 1.1  # how many times as long forwards take on another machine, as it were


def metric(form: str, unknown: float | None = None, *, ends: bool = False) -> Any:
    """Declare a metric: its format, and whether TensorBoard's table of runs has it."""
    return field(default=unknown, metadata={"form": form, "ends": ends})


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Pipeline, speed, freezing and learning of a run.

    None stands for values not measured or not existing. Speed and losses are the writing process's:
    a resumed run sums up its own part only. The first two steps of a phase run cold and are left
    out of medians.
    """

    method: str  # ``freezing.method``, behind "lora+" where adapters learned first
    schedule: str | None = None  # or the name of its CSV file; None without a pipeline
    seed: int | None = None  # ``debug.seed``
    data_seed: int | None = None  # ``data.seed``, where examples are shuffled
    config_file: str | None = None  # ``job.config_file``
    model: str  # name and flavor, such as "llama3 8M"
    dataset: str  # ``training.dataset``, and its path where one is set
    n_devices: int  # processes of the run
    ranks_per_replica: int  # processes that one batch is split among, when the run began
    batches_per_step: int = 1  # pipeline batches of an optimizer step, on each replica
    device: str  # name of the GPU, or of the processor with the number of usable cores
    torch_version: str  # of the process that wrote this
    parameters: int | None = metric("{:,}")  # adapters included; None where all learn at times
    parameters_trained: int | None = metric("{:,}")  # those that are not frozen for good
    adapters_until: int | None = None  # ``lora.until``, from where all parameters learn
    steps: int  # ``training.steps``
    steps_done: int = 0  # number of the last finished step
    started_at: str  # ISO 8601 time with offset

    unit: str = "tokens"  # what throughput counts; of pictures "images", where names say tokens
    counts_padding: bool | None = None  # ``report.count_padding``
    packing: bool | None = None  # ``data.packing``
    padding: float | None = metric("{:.0%}")  # fraction of the tokens of examples' sequences
    # per device, from the median step of warm-up and of the first half of monitoring
    tokens_per_second_unfrozen: float | None = metric("{:,.0f}")
    # per device, from the median step of the stable phase; without freezing, of the run. Of an
    # elastic run it is that in its last pipeline, and so are all other times of the stable phase
    tokens_per_second: float | None = metric("{:,.0f}", ends=True)
    step_ms_unfrozen: float | None = metric(_MS)  # median step in milliseconds, as above
    step_ms: float | None = metric(_MS)  # likewise
    step_ms_off: float | None = metric(_MS)  # since freezing was switched off
    step_ms_adapters: float | None = metric(_MS)  # while adapters learned first
    control_steps: int | None = metric("{:,}")  # those that the gain is measured by, if any
    # what a step takes besides its batches, timed while measuring: optimizer, clipping, data
    outside_ms: float | None = metric(_MS)
    step_ms_predicted: float | None = None  # batches under the plan, and ``outside_ms``
    peak_tflops: float | None = metric("{:.4g}")  # what a device is taken to reach at most
    # model FLOPs utilization before freezing: FLOPs that the model needs for the counted tokens,
    # over the peak; by the virtual clock in an emulation
    mfu_percent_unfrozen: float | None = metric("{:.2f}%")
    mfu_percent: float | None = metric("{:.2f}%")  # of the stable phase, frozen gradients included

    # pipeline batch without freezing, from the measured bounds
    batch_ms_unfrozen_predicted: float | None = None
    batch_ms_unfrozen: float | None = None  # its median as measured, in control steps if there are
    control_batches: int | None = None  # batches of control steps under the last plan, if any
    batch_ms_predicted: float | None = None  # pipeline batch under the plan
    batch_ms: float | None = metric(_MS, ends=True)  # its median as measured, under the last plan
    all_frozen_batch_ms: float | None = metric(_MS)  # predicted, with everything frozen
    # 9 of 10 batches take between 1 / this and this times a prediction, as batches scattered while
    # measuring for the plan
    interval_factor: float | None = None
    predicts_for: str | None = None  # ranks with a device or core of their own, or sharing cores
    # how many times as long as when they were measured forwards took in the stable phase, which no
    # freezing shortens: a miss of the prediction by as much is the machine's
    drift: float | None = metric("{:.2f}")
    planned_gain: float | None = metric("{:+.1%}")  # throughput the plan promises, as a fraction
    upper_bound_gain: float | None = metric("{:+.1%}")  # the same of freezing everything

    # ranks of a pipeline that ran in one process; None where each had its own. Where it is set,
    # batches are measured by the virtual clock, which gives every rank a device of its own; steps
    # and tokens/s without ``virtual`` are those of the one device
    emulated_ranks: int | None = None
    # per emulated device, by the virtual clock
    virtual_tokens_per_second_unfrozen: float | None = None
    virtual_tokens_per_second: float | None = None  # likewise
    virtual_step_ms_unfrozen: float | None = None  # median step by the virtual clock
    virtual_step_ms: float | None = None  # likewise
    virtual_step_ms_off: float | None = None  # likewise
    virtual_step_ms_adapters: float | None = None  # likewise
    real_batch_ms_unfrozen: float | None = None  # median batch as it ran on the one device
    real_batch_ms: float | None = metric(_MS)  # likewise

    gradient_rank: int | None = None  # directions in which frozen weights learn; 0: in none
    planned_stage_ratios: Mapping[int, float] | None = None  # mean over a stage's backwards
    stage_ratios: Mapping[int, float] | None = None  # what the masks of the last step froze
    # mean of all masks over steps, actions and elements
    average_freeze_ratio: float | None = metric("{:.3f}", ends=True)

    steps_factor: float | None = metric("{:.2f}")  # estimated steps to a loss, over those without
    steps_factor_error: float | None = metric("{:.1g}")  # its standard error, of what frozen keep
    # the same for time: ``steps_factor`` times ``kappa``, or times the predicted ratio of batches
    # where ``kappa`` is not known
    time_to_loss: float | None = metric("{:.2f}", ends=True)
    # median step of the stable phase over the median unfrozen one (Eq. 12 of the paper); of an
    # emulation by the virtual clock
    kappa: float | None = metric("{:.3f}", ends=True)
    kappa_error: float | None = metric("{:.1g}")  # its standard error, from how steps scatter
    # fraction of the gradient energy that the stable phase updated, mean by energy (Eq. 28)
    p_eff: float | None = metric("{:.3f}", ends=True)
    kappa_over_p_eff: float | None = metric("{:.2f}", ends=True)  # below 1: a loss sooner (Eq. 13)
    # fraction of the model's tensors that no backward has reached since freezing began
    never_updated_tensors: float | None = metric("{:.1%}")
    never_updated_elements: float | None = metric("{:.1%}")  # the same as a fraction of elements

    reference_run: str | None = None  # folder of ``report.reference_run``
    reference_device: str | None = None  # what it ran on
    reference_loss: float | None = metric("{:.4f}")  # mean of its last logged training losses
    reference_seconds: float | None = metric("{:,.1f} s")  # when its own mean came down to that
    # when this run's did; None if never, or without a reference
    seconds_to_reference_loss: float | None = metric("{:,.1f} s")

    # mean of the losses logged in the last tenth of the steps, or the last one
    train_loss: float | None = metric("{:.4f}", ends=True)
    last_loss: float | None = None  # training loss logged last
    validation_loss: float | None = metric("{:.4f}", ends=True)  # of the last validation
    validation_error: float | None = metric("{:.4f}")  # its standard error over held-out parts
    validation_top1: float | None = metric("{:.2%}")  # fraction of its pictures
    validation_top5: float | None = metric("{:.2%}")

    seconds: float = metric("{:,.1f}", 0.0, ends=True)  # of steps; no validation, no checkpoints
    # of the whole run, parts before this one, moves and restarts included: time of each step times
    # the processes that it had; None in an emulation
    device_seconds: float | None = metric("{:,.1f}")
    # that in hours, times ``report.device_hour_price``; None where this is 0
    cost: float | None = metric("{:,.2f}")
    # largest over the ranks: memory reserved by CUDA's allocator, on a CPU the resident set
    peak_memory_gib: float | None = metric("{:.2f} GiB", ends=True)
    score_ms_per_step: float | None = None  # what a method spends on finding out what to freeze
    score_memory_mib: float | None = None  # what it keeps for that
    cache_batches: int | None = metric("{:,}")  # with a front whose outputs are kept
    cache_entered: int | None = metric("{:,}")  # those of them that began behind it
    cache_saved_ms: float | None = metric("{:,.0f} ms")  # estimated from measured times
    cache_spent_ms: float | None = metric("{:,.0f} ms")  # reading and keeping, on all ranks
    cache_mib: float | None = metric("{:,.0f} MiB")  # what is kept at the end
    cache_read_ahead: int | None = None  # rows of the disk in memory when they were needed
    moves: int | None = None  # how often an elastic run went on in another pipeline
    moves_seconds: float | None = metric("{:,.1f} s")  # what that took; ``seconds`` has none of it
    failure: str | None = None  # why a method that plans has no plan
    switched_off: str | None = None  # since when and why nothing is frozen although there is a plan
    ended_early: str | None = None  # why, after which step, and what was saved

    @property
    def new_speed(self) -> str | None:
        """Text on a machine slower or faster since times were measured."""
        if not self.drift or 1.0 / _OTHER_SPEED <= self.drift <= _OTHER_SPEED:
            return None
        slower = self.drift > 1.0
        factor = self.drift if slower else 1.0 / self.drift
        pairs = "the gain is of steps beside each other"
        told = pairs if self.control_steps else "the gain compares steps at both speeds"
        return f"the machine became {factor:.1f} times {'slower' if slower else 'faster'}; {told}"

    @property
    def padding_told(self) -> str | None:
        """Text on large padding, where packing would help."""
        if self.packing or self.padding is None or self.padding <= _MUCH_PADDING:
            return None
        return (
            f"{self.padding:.0%} of the tokens are padding; data.packing = true would put up to "
            f"{1 / (1 - self.padding):.1f} times as many examples into a sequence"
        )

    def by_virtual_clock(self) -> RunSummary:
        """Return the summary with an emulated run's steps in virtual time."""
        if self.emulated_ranks is None:
            return self
        names = [each.name for each in fields(self) if each.name.startswith("virtual_")]
        return replace(self, **{n.removeprefix("virtual_"): getattr(self, n) for n in names})


# Metrics that a table of runs has.
FINAL = tuple(each.name for each in fields(RunSummary) if each.metadata.get("ends"))


def as_shown(summary: RunSummary) -> dict[str, str]:
    """Return the known metrics of a run by name, formatted."""
    shown_of = {}
    for each in fields(summary):
        if (value := getattr(summary, each.name)) is not None:
            shown_of[each.name] = each.metadata.get("form", "{}").format(value)
    return shown_of


def summary_to_json(summary: RunSummary) -> str:
    """Return the summary as a flat JSON object, in the order of the fields.

    Losses that are not finite stand as ``NaN`` or ``Infinity``, readable by Python: null would mean
    no loss.
    """
    return json.dumps(asdict(summary), indent=2) + "\n"


def read_summary(run_folder: Path) -> RunSummary:
    """Read the summary of a run; an OSError if missing, a ValueError if no run's."""
    values = read_object(run_folder / SUMMARY_FILE)
    try:
        summary, zone = read_dataclass(RunSummary, values), None
        with suppress(ValueError):
            zone = datetime.fromisoformat(summary.started_at).tzinfo
        if zone is None:
            raise ValueError(
                f"started_at is {shown(summary.started_at)}; it must be a time with offset"
            )
    except ValueError as error:
        raise ValueError(f"{SUMMARY_FILE}: {error}") from None
    return summary
