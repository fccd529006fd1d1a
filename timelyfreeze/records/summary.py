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

    Attributes:
        method: ``freezing.method``.
        schedule: Pipeline schedule, or the name of the CSV file that holds it; None without a
            pipeline.
        seed: ``debug.seed``.
        data_seed: ``data.seed``, where it has a say: shuffled examples of instruction data.
        config_file: ``job.config_file``.
        model: Name and flavor, such as "llama3 8M".
        dataset: ``training.dataset``, and its path where one is set.
        n_devices: Processes of the run.
        ranks_per_replica: Processes that one batch is split among; of an elastic run when it
            began.
        batches_per_step: Pipeline batches of an optimizer step, on each replica.
        device: Name of the GPU, or of the processor with the number of usable cores.
        torch_version: Of the process that wrote this.
        parameters: Of the model and its adapters; None where all are trained at times.
        parameters_trained: Those that are not frozen for good.
        steps: ``training.steps``.
        steps_done: Number of the last finished step.
        started_at: ISO 8601 time with offset.
        unit: What throughput counts: "tokens", or "images" for a model that reads pictures; where a
            name here says tokens, it is these.
        counts_padding: ``report.count_padding``.
        tokens_per_second_unfrozen: Per device, from the median step of warm-up and of the first
            half of monitoring.
        tokens_per_second: Per device, from the median step of the stable phase; without freezing,
            of the run. Of an elastic run it is that in its last pipeline, and so are all other
            times of the stable phase.
        step_ms_unfrozen: Median step in milliseconds, as above.
        step_ms: Likewise.
        step_ms_off: Median step in milliseconds since freezing was switched off.
        outside_ms: What a step takes besides its batches, timed while measuring for the plan:
            optimizer, clipping, loading data.
        step_ms_predicted: Batches under the plan, from the measured bounds, and ``outside_ms``.
        peak_tflops: What a device is taken to reach at most, 10^12 operations a second.
        mfu_percent_unfrozen: Model FLOPs utilization before freezing: FLOPs that the model needs
            for the counted tokens, over the peak; by the virtual clock in an emulation.
        mfu_percent: Likewise of the stable phase, FLOPs of frozen gradients included as needed.
        batch_ms_unfrozen_predicted: Pipeline batch without freezing, from the measured bounds.
        batch_ms_unfrozen: Its median as measured.
        batch_ms_predicted: Pipeline batch under the plan.
        batch_ms: Median pipeline batch of the stable phase as measured, under the last plan.
        all_frozen_batch_ms: Pipeline batch with everything frozen, from the measured bounds.
        interval_factor: 9 of 10 batches take between 1 / this and this times a prediction, as
            batches scattered while measuring for the plan.
        predicts_for: What ranks predictions are for: with a device or core of their own, or
            sharing cores.
        emulated_ranks: Ranks of a pipeline that ran in one process; None where each had its own.
            Where it is set, batches are measured by the virtual clock, which gives every rank a
            device of its own; steps and tokens/s without ``virtual`` are those of the one device.
        virtual_tokens_per_second_unfrozen: Per emulated device, by the virtual clock.
        virtual_tokens_per_second: Likewise.
        virtual_step_ms_unfrozen: Median step by the virtual clock.
        virtual_step_ms: Likewise.
        virtual_step_ms_off: Likewise.
        real_batch_ms_unfrozen: Median batch as it ran on the one device.
        real_batch_ms: Likewise.
        drift: How many times as long as when they were measured forwards took in the stable
            phase, which no freezing shortens: a miss of the prediction by as much is the machine's.
        planned_gain: Throughput the plan promises, as a fraction.
        upper_bound_gain: Throughput that freezing everything would give, as a fraction.
        planned_stage_ratios: Mean planned freeze ratio of each stage's backwards.
        stage_ratios: What the masks of the last step froze of each stage.
        average_freeze_ratio: Mean of all masks over steps, actions and elements.
        steps_factor: Estimated steps to a loss over those without freezing; None where unknown.
        time_to_loss: The same for time: ``steps_factor`` times ``kappa``, or times the predicted
            ratio of batches where ``kappa`` is not known.
        kappa: Median step of the stable phase over the median unfrozen one (Eq. 12 of the paper);
            of an emulation by the virtual clock.
        kappa_error: Its standard error, from how steps scatter; None with fewer than 3 of a kind.
        p_eff: Fraction of the gradient energy that the stable phase updated, mean by energy
            (Eq. 28).
        kappa_over_p_eff: Below 1 where freezing gets to a loss sooner (Eq. 13).
        never_updated_tensors: Fraction of the model's tensors that no backward has reached since
            freezing began.
        never_updated_elements: The same as a fraction of elements.
        reference_run: Folder of ``report.reference_run``.
        reference_device: What it ran on.
        reference_loss: Its last training loss, as a mean of the last logged ones.
        reference_seconds: When its own mean came down to that.
        seconds_to_reference_loss: When this run's did; None if never, or without a reference.
        train_loss: Mean of the losses logged in the last tenth of the steps; the last one where
            none was logged there.
        last_loss: Training loss logged last.
        validation_loss: Of the last validation.
        validation_top1: Fraction of its pictures whose class had the highest score.
        validation_top5: Likewise, one of the five highest.
        seconds: Sum of the step times; validation and checkpoints are not in it.
        device_seconds: Of the whole run, parts before this one, moves and restarts included: time
            of each step times the processes that it had; None in an emulation.
        cost: That in hours, times ``report.device_hour_price``; None where this is 0.
        peak_memory_gib: Largest over the ranks: memory reserved by CUDA's allocator, on a CPU the
            resident set.
        score_ms_per_step: What a method spends on finding out what to freeze.
        score_memory_mib: What it keeps for that.
        cache_batches: Batches with a frozen front, where what it puts out is kept.
        cache_entered: Those of them that began behind it.
        cache_saved_ms: By how much these were shorter, estimated from measured times.
        cache_spent_ms: What reading and keeping took, on all ranks together.
        cache_mib: What is kept at the end.
        cache_read_ahead: Rows of the disk that were in memory when they were needed.
        moves: How often an elastic run went on in another pipeline; None for other runs.
        moves_seconds: What that took; ``seconds`` has none of it.
        failure: Why a method that plans has no plan.
        switched_off: Since when and why nothing is frozen although there is a plan.
        ended_early: Why the run ended before its last step, after which one, and what was saved.
    """

    method: str
    schedule: str | None = None
    seed: int | None = None
    data_seed: int | None = None
    config_file: str | None = None
    model: str
    dataset: str
    n_devices: int
    ranks_per_replica: int
    batches_per_step: int = 1
    device: str
    torch_version: str
    parameters: int | None = None
    parameters_trained: int | None = None
    steps: int
    steps_done: int = 0
    started_at: str

    unit: str = "tokens"
    counts_padding: bool | None = None
    tokens_per_second_unfrozen: float | None = None
    tokens_per_second: float | None = None
    step_ms_unfrozen: float | None = None
    step_ms: float | None = None
    step_ms_off: float | None = None
    outside_ms: float | None = None
    step_ms_predicted: float | None = None
    peak_tflops: float | None = None
    mfu_percent_unfrozen: float | None = None
    mfu_percent: float | None = None

    batch_ms_unfrozen_predicted: float | None = None
    batch_ms_unfrozen: float | None = None
    batch_ms_predicted: float | None = None
    batch_ms: float | None = None
    all_frozen_batch_ms: float | None = None
    interval_factor: float | None = None
    predicts_for: str | None = None
    drift: float | None = None
    planned_gain: float | None = None
    upper_bound_gain: float | None = None

    emulated_ranks: int | None = None
    virtual_tokens_per_second_unfrozen: float | None = None
    virtual_tokens_per_second: float | None = None
    virtual_step_ms_unfrozen: float | None = None
    virtual_step_ms: float | None = None
    virtual_step_ms_off: float | None = None
    real_batch_ms_unfrozen: float | None = None
    real_batch_ms: float | None = None

    planned_stage_ratios: Mapping[int, float] | None = None
    stage_ratios: Mapping[int, float] | None = None
    average_freeze_ratio: float | None = None

    steps_factor: float | None = None
    time_to_loss: float | None = None
    kappa: float | None = None
    kappa_error: float | None = None
    p_eff: float | None = None
    kappa_over_p_eff: float | None = None
    never_updated_tensors: float | None = None
    never_updated_elements: float | None = None

    reference_run: str | None = None
    reference_device: str | None = None
    reference_loss: float | None = None
    reference_seconds: float | None = None
    seconds_to_reference_loss: float | None = None

    train_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    validation_top1: float | None = None
    validation_top5: float | None = None

    seconds: float = 0.0
    device_seconds: float | None = None
    cost: float | None = None
    peak_memory_gib: float | None = None
    score_ms_per_step: float | None = None
    score_memory_mib: float | None = None
    cache_batches: int | None = None
    cache_entered: int | None = None
    cache_saved_ms: float | None = None
    cache_spent_ms: float | None = None
    cache_mib: float | None = None
    cache_read_ahead: int | None = None
    moves: int | None = None
    moves_seconds: float | None = None
    failure: str | None = None
    switched_off: str | None = None
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
