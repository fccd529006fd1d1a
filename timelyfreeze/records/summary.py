"""The metrics of one run as one value: what ``summary.json`` holds and the report is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from timelyfreeze.files import parse_json, read_dataclass, read_object, shown

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What ran, how fast, how much was frozen and what was learned.

    None stands for what was not measured or does not exist. Speed and losses are those of the
    process that wrote the summary: a resumed run sums up its own part only. The first two steps of
    a phase run cold and are left out of medians.
    """

    method: str  # ``freezing.method``
    # pipeline schedule, or the name of the CSV file that holds it; None without a pipeline
    schedule: str | None = None
    seed: int | None = None  # ``debug.seed``
    # ``data.seed``, where it has a say: shuffled examples of instruction data
    data_seed: int | None = None
    config_file: str | None = None  # ``job.config_file``
    model: str  # name and flavor, such as "llama3 8M"
    dataset: str  # ``training.dataset``, and its path where one is set
    n_devices: int  # processes of the run
    # processes that one batch is split among; of an elastic run when it began
    ranks_per_replica: int
    batches_per_step: int = 1  # pipeline batches of an optimizer step, on each replica
    device: str  # name of the GPU, or of the processor with the number of usable cores
    torch_version: str  # of the process that wrote this
    # of the model and its adapters; None where all are trained at times
    parameters: int | None = None
    parameters_trained: int | None = None  # those that are not frozen for good
    steps: int  # ``training.steps``
    steps_done: int = 0  # number of the last finished step
    started_at: str  # ISO 8601 time with offset

    # what throughput counts: "tokens", or "images" for a model that reads pictures; where a name
    # here says tokens, it is these
    unit: str = "tokens"
    counts_padding: bool | None = None  # ``report.count_padding``
    # per device, from the median step of warm-up and of the first half of monitoring
    tokens_per_second_unfrozen: float | None = None
    # per device, from the median step of the stable phase; without freezing, of the run. Of an
    # elastic run it is that in its last pipeline, and so are all other times of the stable phase
    tokens_per_second: float | None = None
    step_ms_unfrozen: float | None = None  # median step in milliseconds, as above
    step_ms: float | None = None  # likewise
    step_ms_off: float | None = None  # median step in milliseconds since freezing was switched off
    # what a step takes besides its batches, timed while measuring for the plan: optimizer,
    # clipping, loading data
    outside_ms: float | None = None
    # batches under the plan, from the measured bounds, and ``outside_ms``
    step_ms_predicted: float | None = None
    # what a device is taken to reach at most, 10^12 operations a second
    peak_tflops: float | None = None
    # model FLOPs utilization before freezing: FLOPs that the model needs for the counted tokens,
    # over the peak; by the virtual clock in an emulation
    mfu_percent_unfrozen: float | None = None
    # likewise of the stable phase, FLOPs of frozen gradients included as needed
    mfu_percent: float | None = None

    # pipeline batch without freezing, from the measured bounds
    batch_ms_unfrozen_predicted: float | None = None
    batch_ms_unfrozen: float | None = None  # its median as measured
    batch_ms_predicted: float | None = None  # pipeline batch under the plan
    # median pipeline batch of the stable phase as measured, under the last plan
    batch_ms: float | None = None
    # pipeline batch with everything frozen, from the measured bounds
    all_frozen_batch_ms: float | None = None
    # 9 of 10 batches take between 1 / this and this times a prediction, as batches scattered while
    # measuring for the plan
    interval_factor: float | None = None
    # what ranks predictions are for: with a device or core of their own, or sharing cores
    predicts_for: str | None = None
    # how many times as long as when they were measured forwards took in the stable phase, which no
    # freezing shortens: a miss of the prediction by as much is the machine's
    drift: float | None = None
    planned_gain: float | None = None  # throughput the plan promises, as a fraction
    # throughput that freezing everything would give, as a fraction
    upper_bound_gain: float | None = None

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
    real_batch_ms_unfrozen: float | None = None  # median batch as it ran on the one device
    real_batch_ms: float | None = None  # likewise

    # mean planned freeze ratio of each stage's backwards
    planned_stage_ratios: Mapping[int, float] | None = None
    # what the masks of the last step froze of each stage
    stage_ratios: Mapping[int, float] | None = None
    average_freeze_ratio: float | None = None  # mean of all masks over steps, actions and elements

    # estimated steps to a loss over those without freezing; None where unknown
    steps_factor: float | None = None
    # the same for time: ``steps_factor`` times ``kappa``, or times the predicted ratio of batches
    # where ``kappa`` is not known
    time_to_loss: float | None = None
    # median step of the stable phase over the median unfrozen one (Eq. 12 of the paper); of an
    # emulation by the virtual clock
    kappa: float | None = None
    # its standard error, from how steps scatter; None with fewer than 3 of a kind
    kappa_error: float | None = None
    # fraction of the gradient energy that the stable phase updated, mean by energy (Eq. 28)
    p_eff: float | None = None
    kappa_over_p_eff: float | None = None  # below 1 where freezing gets to a loss sooner (Eq. 13)
    # fraction of the model's tensors that no backward has reached since freezing began
    never_updated_tensors: float | None = None
    never_updated_elements: float | None = None  # the same as a fraction of elements

    reference_run: str | None = None  # folder of ``report.reference_run``
    reference_device: str | None = None  # what it ran on
    reference_loss: float | None = None  # its last training loss, as a mean of the last logged ones
    reference_seconds: float | None = None  # when its own mean came down to that
    # when this run's did; None if never, or without a reference
    seconds_to_reference_loss: float | None = None

    # mean of the losses logged in the last tenth of the steps; the last one where none was logged
    # there
    train_loss: float | None = None
    last_loss: float | None = None  # training loss logged last
    validation_loss: float | None = None  # of the last validation
    # fraction of its pictures whose class had the highest score
    validation_top1: float | None = None
    validation_top5: float | None = None  # likewise, one of the five highest

    seconds: float = 0.0  # sum of the step times; validation and checkpoints are not in it
    # of the whole run, parts before this one, moves and restarts included: time of each step times
    # the processes that it had; None in an emulation
    device_seconds: float | None = None
    # that in hours, times ``report.device_hour_price``; None where this is 0
    cost: float | None = None
    # largest over the ranks: memory reserved by CUDA's allocator, on a CPU the resident set
    peak_memory_gib: float | None = None
    score_ms_per_step: float | None = None  # what a method spends on finding out what to freeze
    score_memory_mib: float | None = None  # what it keeps for that
    cache_batches: int | None = None  # batches with a frozen front, where what it puts out is kept
    cache_entered: int | None = None  # those of them that began behind it
    # by how much these were shorter, estimated from measured times
    cache_saved_ms: float | None = None
    cache_spent_ms: float | None = None  # what reading and keeping took, on all ranks together
    cache_mib: float | None = None  # what is kept at the end
    # rows of the disk that were in memory when they were needed
    cache_read_ahead: int | None = None
    # how often an elastic run went on in another pipeline; None for other runs
    moves: int | None = None
    moves_seconds: float | None = None  # what that took; ``seconds`` has none of it
    failure: str | None = None  # why a method that plans has no plan
    switched_off: str | None = None  # since when and why nothing is frozen although there is a plan
    # why the run ended before its last step, after which one, and what was saved
    ended_early: str | None = None


def summary_to_json(summary: RunSummary) -> str:
    """Return the summary as a flat JSON object, in the order of the fields.

    A loss that is not finite stands there as ``NaN`` or ``Infinity``, which Python reads: null
    would say that there was none.
    """
    return json.dumps(asdict(summary), indent=2) + "\n"


def summary_from_json(text: str | bytes) -> RunSummary:
    """Read what :func:`summary_to_json` wrote; a metric that is missing is None.

    Raises:
        ValueError: If the text is no JSON object, has unknown fields, values of another kind, or
            lacks a field that every run has.
    """
    return _summary(parse_json(text))


def read_summary(run_folder: Path) -> RunSummary:
    """Read the summary of a run.

    Raises:
        OSError: If there is none.
        ValueError: If it is none of a run; names the file and the key.
    """
    values = read_object(run_folder / SUMMARY_FILE)
    try:
        return _summary(values)
    except ValueError as error:
        raise ValueError(f"{SUMMARY_FILE}: {error}") from None


def _summary(values: Any) -> RunSummary:
    summary = read_dataclass(RunSummary, values)
    started = summary.started_at
    try:
        zone = datetime.fromisoformat(started).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise ValueError(f"started_at is {shown(started)}; it must be a time with offset")
    return summary
