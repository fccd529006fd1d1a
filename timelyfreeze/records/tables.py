"""Learning of a run over steps and time: losses, time to a loss, accuracies."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from timelyfreeze.files import (
    MOST,
    AnyFloat,
    Count,
    Fraction,
    Number,
    OneOf,
    Seconds,
    Table,
    Within,
    read_dataclass,
    read_object,
)
from timelyfreeze.settings import FIRST_STAGE_MODES, Phase

# Logged losses that a running mean is taken over.
WINDOW = 5


@dataclass(frozen=True)
class LossRow:
    """A logged loss."""

    step: Count  # optimizer step after which it was taken
    seconds: Seconds  # sum of the step times until then
    train_loss: float | None  # None in a row of a validation
    validation_loss: float | None  # None in a row of a training step


@dataclass(frozen=True)
class AccuracyRow:
    """A validation of an image classifier."""

    step: Count  # optimizer step after which it was made
    seconds: Seconds  # sum of the step times until then
    top1: Fraction  # fraction of the pictures whose class had the highest score
    top5: Fraction  # fraction of those whose class was among the five highest


LOSSES = Table("losses.csv", LossRow)
ACCURACIES = Table("accuracies.csv", AccuracyRow)


def running_means(values: Sequence[float], window: int) -> list[float]:
    """Return means over ``window`` consecutive values; empty for too few."""
    return [_mean(values[i : i + window]) for i in range(len(values) - window + 1)]


def last_running_mean(curve: Sequence[tuple[float, float]], window: int) -> float | None:
    """Return the mean loss of the last ``window`` (seconds, loss); None if not finite, or fewer."""
    means = running_means([loss for _, loss in curve], window)
    return means[-1] if means and math.isfinite(means[-1]) else None


def seconds_to_reach(
    curve: Sequence[tuple[float, float]], target: float, window: int
) -> float | None:
    """Return the seconds at the end of the first window whose mean loss is at most ``target``."""
    means = running_means([loss for _, loss in curve], window)
    ends = [seconds for seconds, _ in curve[window - 1 :]]
    return next((s for s, mean in zip(ends, means, strict=True) if mean <= target), None)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN where the sum is beyond numbers, or infinities of both signs meet."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        return math.nan


@dataclass(frozen=True)
class StepRow:
    """An optimizer step; None for values not measured."""

    step: Number  # its number, from 1
    phase: Annotated[str, OneOf("", *(phase.value for phase in Phase))]  # "" without freezing
    seconds: Seconds  # sum of the step times up to and including this one, of this process's run
    step_ms: AnyFloat  # how long it took
    tokens_per_second: AnyFloat  # of each device
    virtual_step_ms: AnyFloat | None = None  # in an emulation, on devices of their own
    freeze_ratio: Fraction | None = None  # of all elements, mean over backwards and ranks
    batch_ms: AnyFloat | None = None  # median of the phase since the last step that was logged
    batch_predicted_ms: AnyFloat | None = None  # prediction for the batches of this step
    train_loss: AnyFloat | None = None  # where it was logged
    # median step, likewise, over the median unfrozen step (arXiv:2602.05754, Eq. 12)
    kappa: AnyFloat | None = None
    p_eff: AnyFloat | None = None  # fraction of the gradient energy that they updated (Eq. 27)


STEPS = Table("steps.csv", StepRow)


@dataclass(frozen=True)
class Move:
    """A move; a run without moves has no file."""

    step: Number  # first optimizer step in the new pipeline
    frozen_layers: Count  # layers of the front that were frozen then
    ranks: Number  # ranks of the new pipeline
    replicas: Number  # copies of it that share each batch of the run
    split: str  # layers on each of its ranks, such as ``"8 2"``; "" as before, adapters merged
    seconds: Seconds  # what the move took: saving, building, loading. No step time has it


MOVES = Table("moves.csv", Move)


@dataclass(frozen=True)
class FrontRow:
    """The front in an optimizer step; None for missing values."""

    step: Number  # its number, from 1
    phase: Annotated[str, OneOf(*(phase.value for phase in Phase))]  # name of its phase
    frozen_layers: Count  # blocks of the front; 0 where the policy's choice is not in force
    batches: Number  # batches of the step
    read: Count | None = None  # those that began behind the front, by the activation cache
    frozen_modules: Count | None = None  # modules of the front, of a policy that has modules
    bootstrapping: Count | None = None  # 1 while such a policy does not look at them yet, then 0

    def __post_init__(self) -> None:
        """Refuse more than all."""
        if self.read is not None and self.read > self.batches:
            raise ValueError(f"read is {self.read}; it must not be above batches ({self.batches})")


@dataclass(frozen=True)
class PlasticityRow:
    """An evaluation of the frontmost live module."""

    step: Number  # optimizer step whose batch went through the module and its reference
    module: Count  # number of the module, from the front
    plasticity: AnyFloat  # how far their outputs lie apart
    smoothed: AnyFloat  # its moving mean


FRONT = Table("front.csv", FrontRow)
PLASTICITY = Table("plasticity.csv", PlasticityRow)


@dataclass(frozen=True)
class FrozenCount:
    """A tensor's freezing since its begin."""

    rank: Count  # pipeline rank that holds it
    stage: Count  # stage that it belongs to
    parameter: str  # its name in the model
    elements: Number  # number of its elements
    backwards: Count  # that could have updated it, since freezing began
    times_frozen: Count  # how many of them left it out

    def __post_init__(self) -> None:
        """Refuse more than all."""
        if self.times_frozen > self.backwards:
            raise ValueError(
                f"times_frozen is {self.times_frozen}; it must not be above backwards "
                f"({self.backwards})"
            )

    @property
    def frequency(self) -> float:
        """Fraction of the backwards without the tensor; 0 without backwards."""
        return self.times_frozen / self.backwards if self.backwards else 0.0

    @property
    def never_updated(self) -> bool:
        """Whether the tensor got no backward."""
        return self.backwards > 0 and self.times_frozen == self.backwards


COUNTS = Table("frozen_counts.csv", FrozenCount)


def never_updated(counts: Sequence[FrozenCount]) -> dict[str, float]:
    """Return the fraction never updated, for a summary; nothing before freezing begins."""
    if not any(count.backwards for count in counts):
        return {}
    still = [count for count in counts if count.never_updated]
    elements = sum(count.elements for count in still) / sum(count.elements for count in counts)
    return {"never_updated_tensors": len(still) / len(counts), "never_updated_elements": elements}


PROFILE_FILE = "response.json"
_PROFILE = "profile"
_PROFILES = (_PROFILE, *(f"{_PROFILE} {mode}" for mode in FIRST_STAGE_MODES))


@dataclass(frozen=True)
class ResponseRow:
    """A backward."""

    stage: Count  # its stage
    kind: Annotated[str, OneOf("B", "W")]  # "B", or "W" for the weight half of a split one
    # phase of the run it was timed in. "profile" where each stage was timed alone, with the way of
    # freezing the first one behind it; it is the median of several then
    phase: Annotated[str, OneOf(*(phase.value for phase in Phase), *_PROFILES)]
    microbatch: Annotated[int, Within(-1, MOST)]  # its microbatch; -1 where that is not known
    fraction: Fraction  # fraction of the stage's elements that it froze
    duration_ms: AnyFloat  # how long it took
    cut: Annotated[int, Within(0, 1)] = 0  # 1 if nobody needed its input gradient


RESPONSES = Table("responses.csv", ResponseRow)


def read_responses(folder: Path) -> list[ResponseRow]:
    """Read the responses of a run or a profile; an OSError without either.

    A profile has medians, for the first stage by way of freezing.
    """
    path = folder / PROFILE_FILE
    if (folder / RESPONSES.name).exists() or not path.exists():
        return RESPONSES.read(folder)
    try:
        rows = [
            {
                "stage": stage["stage"],
                "kind": kind,
                "phase": f"{_PROFILE} {stage['first_stage'] or ''}".rstrip(),
                "microbatch": -1,
                "fraction": point["fraction"],
                "duration_ms": point["median_ms"],
            }
            for stage in read_object(path)["stages"]
            for kind, curve in stage["curves"].items()
            for point in curve["points"]
        ]
        return [read_dataclass(ResponseRow, row) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what a profile writes: {error}") from error
