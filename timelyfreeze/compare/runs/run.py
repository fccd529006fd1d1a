"""The runs of a comparison, read from the files that they left.

A run leaves ``summary.json`` and ``losses.csv`` in its folder when it ends, ``settings.json`` and
``steps.csv`` while it goes on, and ``evaluate`` its scores in ``scores.json``. One that was started
by ``timelyfreeze compare run`` has a record as well, in the folder that the run was started in; it
tells of runs that never came to writing a summary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from timelyfreeze.compare.runs.peers import PEER_KEYS, freezes, split_peer
from timelyfreeze.files import read_dataclass, read_object
from timelyfreeze.policies import LORA, registered_policies
from timelyfreeze.records import (
    ACCURACIES,
    LOSSES,
    MOVES,
    SCORES,
    STEPS,
    SUMMARY_FILE,
    AccuracyRow,
    LossRow,
    Move,
    RunSummary,
    Scores,
    StepRow,
    read_scores,
    read_summary,
)

SETTINGS = "settings.json"
RECORD = "comparison_run.json"
# Holds the scores of the model before training.
BASE_MODEL = "base_model"
# Holds what runs left that did not end; nothing in it counts.
SET_ASIDE = "set_aside"

FINISHED, UNFINISHED, FAILED = "finished", "unfinished", "failed"

Points = Sequence[tuple[float, float]]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One training run."""

    folder: Path  # where its files are
    # ``finished``, ``unfinished`` or ``failed``. A run is finished if it did all the steps that it
    # was asked for.
    status: str
    method: str  # the freezing method
    schedule: str  # the pipeline schedule; ``-`` without a pipeline
    seed: int | None  # the seed of the weights, or None if none was set
    # What the run says of itself; None if it ended before it wrote that.
    told: RunSummary | None = None
    # Seconds of training at the end of each step, moves to other pipelines included; empty where
    # they are not known.
    step_ends: Sequence[float] = ()
    # Whether seconds are those that the pipeline would have taken, had each emulated rank a device
    # of its own.
    by_virtual_clock: bool = False
    losses: Points = ()  # (seconds of training so far, training loss) of each step that was logged
    scores: Scores | None = None  # of the model that came out, None if it was not evaluated
    validation_losses: Points = ()  # (seconds of training so far, loss) of each validation
    # (seconds of training so far, percent of the pictures) of each validation on pictures.
    top1: Points = ()
    freeze_ratios: Points = ()  # (step, freeze ratio) of each step for which it is known
    # The run's configuration, flat; empty if the run left none.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Keys that ``compare run`` was asked to vary, with the values of this run.
    variant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> RunSummary:
        """What the run says of itself.

        Raises:
            ValueError: If it left no summary, which no finished run does.
        """
        if self.told is None:
            raise ValueError(f"{self.folder} has no {SUMMARY_FILE}")
        return self.told

    @property
    def seconds(self) -> float:
        """Seconds of training and moves, by the virtual clock where the pipeline is emulated."""
        if self.by_virtual_clock:
            return self.step_ends[-1]
        return self.summary.seconds + (self.summary.moves_seconds or 0.0)

    @property
    def label(self) -> str:
        """What a reader calls the run."""
        return run_label(self.schedule, self.method, self.seed, self.variant)


@dataclass(frozen=True)
class FoundRuns:
    """All runs below some folders, what could not be read, scores of models before training."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()
    base_models: tuple[Scores, ...] = ()


def find_runs(folders: Iterable[Path]) -> FoundRuns:
    """Return the runs below ``folders``, in the order of their paths.

    A record without any summary below it makes a run too: one that failed, or was cut off.

    Raises:
        ValueError: If one of ``folders`` is not a folder.
    """
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name folders that hold runs")
    unreadable: list[str] = []

    def read(name: str, reader: Callable[[Path], T]) -> Iterator[T]:
        paths = {path.resolve() for folder in folders for path in folder.rglob(name)
                 if SET_ASIDE not in path.relative_to(folder).parts}  # fmt: skip
        for path in sorted(paths):
            try:
                yield reader(path.parent)
            except (OSError, ValueError) as error:
                unreadable.append(f"{path.parent}: {error}")

    runs = list(read(SUMMARY_FILE, read_run))
    for recorded in read(RECORD, _recorded_run):
        own = [i for i, run in enumerate(runs) if run.folder.is_relative_to(recorded.folder)]
        for i in own:
            method = recorded.method if split_peer(recorded.method) else runs[i].method
            runs[i] = replace(runs[i], method=method, variant=recorded.variant)
        if not own:
            runs.append(recorded)
        elif all(runs[i].status != FINISHED for i in own):
            for i in own:
                runs[i] = replace(runs[i], status=recorded.status)
    bases = tuple(scores for scores in read(f"{BASE_MODEL}/{SCORES}", read_scores) if scores)
    return FoundRuns(tuple(sorted(runs, key=lambda run: run.folder)), tuple(unreadable), bases)


def find_any(folders: Sequence[Path]) -> FoundRuns:
    """Return the runs below ``folders``.

    Raises:
        ValueError: If there are none, or one of ``folders`` is no folder.
    """
    found = find_runs(folders)
    if not found.runs and not found.unreadable:
        names = ", ".join(map(str, folders))
        raise ValueError(f"no {SUMMARY_FILE} below {names}; a run writes it when it ends")
    return found


def read_run(folder: Path) -> Run:
    """Read the summary in ``folder``, and what else the run left there.

    Raises:
        OSError: If there is no summary.
        ValueError: If a file does not hold what it should; the key or the line is named.
    """
    summary = read_summary(folder)
    losses = LOSSES.read(folder) if (folder / LOSSES.name).exists() else []
    accuracies = ACCURACIES.read(folder) if (folder / ACCURACIES.name).exists() else []
    steps = STEPS.read(folder) if (folder / STEPS.name).exists() else []
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    moves = MOVES.read(folder) if (folder / MOVES.name).exists() else []
    virtual = virtual_ends(summary, steps, losses)

    def end(row: StepRow | LossRow | AccuracyRow) -> float:
        return virtual.get(row.step, row.seconds) + moved_seconds(moves, row.step)

    return Run(
        folder=folder,
        status=FINISHED if summary.steps_done == summary.steps else UNFINISHED,
        method=summary.method,
        schedule=summary.schedule or "-",
        seed=summary.seed,
        told=summary,
        step_ends=[end(row) for row in steps],
        by_virtual_clock=bool(virtual),
        losses=_known((end(row), row.train_loss) for row in losses),
        scores=read_scores(folder),
        validation_losses=_known((end(row), row.validation_loss) for row in losses),
        top1=[(end(row), 100 * row.top1) for row in accuracies],
        freeze_ratios=_known((row.step, row.freeze_ratio) for row in steps),
        settings=flatten(settings),
    )


def _known(points: Iterable[tuple[float, float | None]]) -> Points:
    return [(x, y) for x, y in points if y is not None]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``settings`` as one level of dotted keys, as on the command line."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat


@dataclass(frozen=True)
class _Record:
    """What the record of a run says of it; without an exit status it was cut off."""

    schedule: str
    method: str
    seed: int | None
    exit_status: int | None
    variant: Mapping[str, str] = field(default_factory=dict)


def _recorded_run(place: Path) -> Run:
    """Return the run of a record as one that left no summary."""
    values = read_object(place / RECORD)
    known = {one.name: values[one.name] for one in fields(_Record) if one.name in values}
    try:
        record = read_dataclass(_Record, known)
    except ValueError as error:
        raise ValueError(f"{RECORD}: {error}") from None
    status = UNFINISHED if record.exit_status is None else FAILED
    variant = read_variant(record.variant)
    return Run(place, status, record.method, record.schedule, record.seed, variant=variant)


# Flat: a key is the name of section and option, as on the command line.
FlatSettings = Mapping[str, Any]
# How long a step takes depends on these, apart from the freezing.
WORK = ("model", "training", "parallelism", "activation_checkpoint", "compile", "quantize",
        "emulation")  # fmt: skip
SECTIONS = (*WORK, "optimizer", "lr_scheduler", "data", "freezing", LORA)
# What a comparison varies by itself, where files lie, and what changes no metric.
LEFT_OUT = frozenset({
    "freezing.method", "freezing.seed", "data.seed", "training.seed",
    "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv",
    "training.dataset_path", "training.gc_freq", "training.gc_debug", "model.hf_assets_path",
    "model.tokenizer_path", "model.print_after_conversion",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
})  # fmt: skip
# Upstream's list of every stage's modules, and ours, from which it follows.
_CUT, _PARTITION = "parallelism.module_fqns_per_model_part", "parallelism.partition"
# Options of `compare run` that set these.
_OPTIONS = {
    "freezing.method": "--methods",
    "parallelism.pipeline_parallel_schedule": "--schedules",
    **dict.fromkeys(("debug.seed", "data.seed", "freezing.seed"), "--seeds"),
    "job.config_file": "CONFIG",
    "job.dump_folder": "OUTPUT",
}
# As they stand in a variant; on the command line they are --key and --no_key.
TRUTHS = {"true": True, "false": False}
# Readers know options of these sections without their section.
_SHORT = re.compile(r"^(freezing|parallelism|training)\.")
_ASKED = re.compile(r"([a-z_]\w*(?:\.\w+)+)=([^,]+(?:,[^,]+)*)")


def parse_variants(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the variants that ``--vary`` asks for: the product of all values of all keys.

    Args:
        texts: Each is such as ``freezing.max_freeze_ratio=0.2,0.4``. None gives one variant, of
            no key.

    Raises:
        ValueError: If a text is not of that form, or names a key or a value twice, or a key that
            the comparison sets by itself.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        match = _ASKED.fullmatch(text)
        if match is None:
            raise ValueError(
                f"--vary is {text!r}; it must be a key and its values, such as "
                "freezing.max_freeze_ratio=0.2,0.4"
            )
        key, listed = match.groups()
        if key in _OPTIONS:
            raise ValueError(f"--vary has {key}; use {_OPTIONS[key]} instead")
        if key in values:
            raise ValueError(f"--vary has {key} twice; give all its values at once")
        values[key] = listed.split(",")
        if len({_value(text) for text in values[key]}) < len(values[key]):
            raise ValueError(f"--vary has {key}={listed}; name each value once")
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def concerning(name: str, variant: Mapping[str, str]) -> dict[str, str]:
    """Return those keys of a variant that make another run of a method, or of its peer.

    A run of none is the same one under every key of the freezing, and a method under the options
    of another. Adapters have a section of their own and nothing of the freezing.
    """
    _, method = split_peer(name) or ("", name)
    return {key: value for key, value in variant.items() if _concerns(key, method)}


def run_label(schedule: str, name: str, seed: int | None, variant: Mapping[str, Any]) -> str:
    """Return what a reader calls a run."""
    varied = [f"{_short(key)} {value}" for key, value in variant.items()]
    return " ".join([schedule, name, *varied, f"seed {'-' if seed is None else seed}"])


def variant_folder(variant: Mapping[str, str]) -> Path:
    """Return a folder for the runs of a variant, another one for each."""
    return Path(*(quote(f"{_short(key)}={value}", safe="=") for key, value in variant.items()))


def read_variant(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a variant as a run's settings have them: numbers and truths, if any."""
    return {key: _value(text) for key, text in texts.items()}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return TRUTHS.get(text, text)


def work_differs(one: FlatSettings, other: FlatSettings) -> bool:
    """Tell whether steps of two runs have something else to do, as far as both are known.

    How many steps there are is no part of it.
    """
    return any(
        key in other and other[key] != value
        for key, value in one.items()
        if key.split(".")[0] in WORK and key not in LEFT_OUT and key != "training.steps"
    )


def variants(
    method: str, settings: Sequence[FlatSettings], asked: Sequence[FlatSettings] = ()
) -> list[str]:
    """Return of each run the settings in which it differs from other runs of its method.

    Seeds, schedules and the options of other methods count for nothing, for ``none`` and its peers
    no option of the freezing, and for peers nothing that is fitted. What was asked for as a variant
    counts in any case, and so does that a run was not asked for it.

    Args:
        method: Of all the runs.
        settings: Of each run, flat, and empty where they are not known.
        asked: The variant of each run; nothing if none was asked for.

    Returns:
        Texts such as ``max_freeze_ratio 0.5``, empty where runs do not differ.
    """
    asked = asked or [{}] * len(settings)
    counting = [
        {
            **{key: own[key] for key in own if _counts(key, method) and not _follows(key, own)},
            **variant,
        }
        for own, variant in zip(settings, asked, strict=True)
    ]
    keys = set(itertools.chain.from_iterable(counting))
    always = set(itertools.chain.from_iterable(asked))

    def differs(key: str) -> bool:
        known = {repr(own[key]) for own in counting if key in own}
        return len(known) + (key in always and any(key not in own for own in counting)) > 1

    apart = {key for key in keys if differs(key)}
    return [_listed(own, apart) for own in counting]


def _listed(own: FlatSettings, apart: Iterable[str]) -> str:
    found = ((_short(key), value) for key, value in own.items() if key in apart)
    return ", ".join(f"{name} {'unset' if value in ('', None) else value}" for name, value in found)


def _short(key: str) -> str:
    return _SHORT.sub("", key)


def _follows(key: str, own: FlatSettings) -> bool:
    """Return whether a key says what another one has led to."""
    return key == _CUT and bool(own.get(_PARTITION))


def _counts(key: str, method: str) -> bool:
    """Return whether ``key`` may set runs of ``method`` apart."""
    section = key.split(".")[0]
    if section not in SECTIONS or key in LEFT_OUT:
        return False
    if split_peer(method) and key in PEER_KEYS:
        return False
    return _concerns(key, method)


def _concerns(key: str, method: str) -> bool:
    """Return whether ``key`` makes a difference to a run of ``method``, as far as that is known."""
    section = key.split(".")[0]
    if section == LORA:
        return method == LORA
    if section != "freezing":
        return True
    return method != LORA and freezes(method) and not _is_of_other_method(key, method)


def _is_of_other_method(key: str, method: str) -> bool:
    """Return whether ``key`` of the freezing is an option of a policy that ``method`` has not."""
    others = registered_policies().keys() - method.split("+")
    return any(section in others for section in key.split(".")[1:-1])


def virtual_ends(
    summary: RunSummary, steps: Sequence[StepRow], losses: Sequence[LossRow]
) -> dict[int, float]:
    """Return seconds at the end of each step of an emulated pipeline, by its virtual clock.

    Empty for any other run, and where the clock has not told of all steps.
    """
    known = [
        (row.step, row.virtual_step_ms)
        for row in steps
        if row.virtual_step_ms is not None and 0.0 < row.virtual_step_ms < math.inf
    ]
    if summary.emulated_ranks is None or len(known) < len(steps):
        return {}
    ends = itertools.accumulate(ms / 1e3 for _, ms in known)
    found = dict(zip((step for step, _ in known), ends, strict=True))
    return found if all(row.step in found for row in losses) else {}


def moved_seconds(moves: Sequence[Move], step: int) -> float:
    """Return what the moves of an elastic run up to a step took, of which no step's time has any.

    In an emulation they took one process so long.
    """
    return sum(move.seconds for move in moves if move.step <= step)
